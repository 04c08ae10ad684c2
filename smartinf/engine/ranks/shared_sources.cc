#include "smartinf/engine/ranks/shared_sources.h"

#include <array>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "smartinf/base/check.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/engine/ranks/messages.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

// ---- What is said of a device.

void write(MessageWriter& out, const storage::StoreState& state) {
  out.value(state.run).value(state.device_index).value(state.device_count);
  out.value(state.committed_step).value(state.prepared_step).value(state.copied_step);
  out.value(uint8_t{state.initialized}).value(uint8_t{state.complete}).value(uint8_t{state.torn});
}

storage::StoreState read_state(MessageReader& in) {
  storage::StoreState state;
  state.run = in.value<storage::RunId>();
  state.device_index = in.value<uint32_t>();
  state.device_count = in.value<uint32_t>();
  state.committed_step = in.value<base::StepNumber>();
  state.prepared_step = in.value<base::StepNumber>();
  state.copied_step = in.value<base::StepNumber>();
  state.initialized = in.value<uint8_t>() != 0;
  state.complete = in.value<uint8_t>() != 0;
  state.torn = in.value<uint8_t>() != 0;
  return state;
}

void write(MessageWriter& out, const storage::StoreLayout& layout) {
  out.value(layout.run).value(layout.device_index).value(layout.device_count);
  out.value(layout.format).value(layout.checksum_kind).list(layout.planes);
  out.list(layout.subgroups).value(layout.gradient_spill_bytes).text(layout.description);
  out.value(layout.copied_step);
}

storage::StoreLayout read_layout(MessageReader& in) {
  storage::StoreLayout layout;
  layout.run = in.value<storage::RunId>();
  layout.device_index = in.value<uint32_t>();
  layout.device_count = in.value<uint32_t>();
  layout.format = in.value<base::StateFormat>();
  layout.checksum_kind = in.value<storage::ChecksumKind>();
  layout.planes = in.list<base::PlaneKind>();
  layout.subgroups = in.list<storage::StoredSubgroup>();
  layout.gradient_spill_bytes = in.value<uint32_t>();
  layout.description = in.text();
  layout.copied_step = in.value<base::StepNumber>();
  return layout;
}

void write(MessageWriter& out, const csd::DeviceInfo& info) {
  out.text(info.name).text(info.kind).text(info.ring).value(info.slots).value(info.memory_bytes);
  out.value(info.gradient_memory_bytes).value(uint8_t{info.gradients_spilled});
  out.status(info.updates_as_completed).value(info.threads).value(info.state_cache_bytes);
  out.value(info.cached_subgroups).value(info.spool_bytes).value(info.weight_read_slots);
}

csd::DeviceInfo read_info(MessageReader& in) {
  csd::DeviceInfo info;
  info.name = in.text();
  info.kind = in.text();
  info.ring = in.text();
  info.slots = in.value<uint32_t>();
  info.memory_bytes = in.value<uint64_t>();
  info.gradient_memory_bytes = in.value<uint64_t>();
  info.gradients_spilled = in.value<uint8_t>() != 0;
  info.updates_as_completed = in.status();
  info.threads = in.value<uint32_t>();
  info.state_cache_bytes = in.value<uint64_t>();
  info.cached_subgroups = in.value<uint32_t>();
  info.spool_bytes = in.value<uint64_t>();
  info.weight_read_slots = in.value<uint32_t>();
  return info;
}

/// The rank that has a device tells the others.
class Teller {
 public:
  Teller(std::shared_ptr<Collectives> ranks, uint32_t owner)
      : ranks_(std::move(ranks)), owner_(owner) {}

  bool here() const { return ranks_->rank() == owner_; }
  uint32_t owner() const { return owner_; }
  Collectives& ranks() const { return *ranks_; }

  /// What `ask` gives where the device is, on all ranks. ask(MessageWriter&) -> Status.
  template <typename Ask>
  Result<std::string> tell(const Ask& ask) const {
    std::string text;
    if (here()) {
      MessageWriter answer;
      const Status status = ask(answer);
      text = MessageWriter().status(status).text(status.ok() ? answer.take() : "").take();
    }
    SI_RETURN_IF_ERROR(broadcast(*ranks_, Channel::kControl, text, owner_));
    MessageReader in(text);
    Status status = in.status();
    std::string answer = in.text();
    if (!in.ok()) status = Status(ErrorCode::kCorrupt, "sent what this program cannot read");
    if (!status.ok()) return std::move(status).with_context(fmt::format("rank {}", owner_));
    return answer;
  }
  template <typename Ask>
  Status tell_status(const Ask& ask) const {
    return tell([&](MessageWriter&) { return ask(); }).status();
  }

 private:
  std::shared_ptr<Collectives> ranks_;
  uint32_t owner_;
};

/// The state of a device elsewhere. Its blocks are not to be had here.
class SnapshotElsewhere : public csd::Snapshot {
 public:
  SnapshotElsewhere(std::string name, storage::StoreLayout layout, MessageReader& in)
      : name_(std::move(name)),
        layout_(std::move(layout)),
        state_(smartinf::engine::read_state(in)) {
    metadata_ = in.text();
  }
  const std::string& name() const override { return name_; }
  const storage::StoreState& state() const override { return state_; }
  const storage::StoreLayout& layout() const override { return layout_; }
  bool elsewhere() const override { return true; }
  Status choose_step(base::StepNumber) override { return Status(); }
  std::string client_metadata() const override { return metadata_; }
  Status read_blocks(size_t, size_t, uint64_t, uint64_t, std::span<std::byte>) override {
    return Status(ErrorCode::kUnsupported, "the state of a device that another rank has");
  }
  uint64_t blocks_without_checksum() const override { return 0; }

 protected:
  std::string metadata_;

 private:
  const std::string name_;
  const storage::StoreLayout layout_;
  const storage::StoreState state_;
};

/// The same of a device that nobody has opened: its metadata are told when the step is chosen.
class ToldSnapshot final : public SnapshotElsewhere {
 public:
  /// here: null elsewhere.
  ToldSnapshot(Teller teller, std::unique_ptr<csd::Snapshot> here, std::string name,
               storage::StoreLayout layout, MessageReader& in)
      : SnapshotElsewhere(std::move(name), std::move(layout), in),
        teller_(std::move(teller)),
        here_(std::move(here)) {}
  Status choose_step(base::StepNumber step) override {
    SI_ASSIGN_OR_RETURN(const std::string told, teller_.tell([&](MessageWriter& out) -> Status {
      SI_RETURN_IF_ERROR(here_->choose_step(step));
      out.text(here_->client_metadata());
      return Status();
    }));
    metadata_ = MessageReader(told).text();
    return Status();
  }

 private:
  const Teller teller_;
  const std::unique_ptr<csd::Snapshot> here_;
};

/// A device of some rank: the thing itself, or what stands for it.
class SharedDevice final : public csd::Device {
 public:
  /// here: null elsewhere. description: what it has told of itself.
  SharedDevice(Teller teller, std::unique_ptr<csd::Device> here, std::string_view description)
      : teller_(std::move(teller)), here_(std::move(here)) {
    MessageReader in(description);
    layout_ = read_layout(in);
    state_ = smartinf::engine::read_state(in);
    read_changing(in);
  }

  const csd::DeviceInfo& info() const override { return info_; }
  const storage::StoreLayout& layout() const override { return layout_; }
  storage::StoreState state() const override { return here_ ? here_->state() : state_; }
  std::string client_metadata() const override {
    return here_ ? here_->client_metadata() : metadata_;
  }
  Status recover_to(base::StepNumber step) override {
    return change([&] { return here_->recover_to(step); });
  }
  Status cache_state(std::span<const base::SubgroupId> subgroups) override {
    return change([&] { return here_->cache_state(subgroups); });
  }

  void submit(csd::Command& command) override {
    if (here_) return here_->submit(command);
    if (const auto* update = command.as<csd::Update>()) {
      for (const csd::SubgroupUpdate& each : update->updates) {
        command.replies->push(
            {&command, csd::Completion::Event::kWeightsReady, each.subgroup, Status()});
      }
    }
    command.replies->push({&command, csd::Completion::Event::kDone, {}, Status()});
  }

  base::TrafficReading host_traffic() const override {
    return here_ ? here_->host_traffic() : base::TrafficReading();
  }
  base::TrafficReading store_traffic() const override {
    return here_ ? here_->store_traffic() : base::TrafficReading();
  }
  uint64_t bytes_written_ever() const override { return here_ ? here_->bytes_written_ever() : 0; }
  uint64_t state_bytes_cached() const override { return here_ ? here_->state_bytes_cached() : 0; }
  std::span<std::byte> scratch_memory() override {
    return here_ ? here_->scratch_memory() : std::span<std::byte>();
  }
  Result<std::unique_ptr<csd::Snapshot>> snapshot() override {
    std::unique_ptr<csd::Snapshot> made;
    SI_ASSIGN_OR_RETURN(const std::string told, teller_.tell([&](MessageWriter& out) -> Status {
      SI_ASSIGN_OR_RETURN(made, here_->snapshot());
      write(out, made->state());
      out.text(here_->client_metadata());
      return Status();
    }));
    if (made != nullptr) return made;
    MessageReader in(told);
    return std::unique_ptr<csd::Snapshot>(
        std::make_unique<SnapshotElsewhere>(info_.name, layout_, in));
  }

  /// What the device says of itself.
  static void describe(const csd::Device& device, MessageWriter& out) {
    write(out, device.layout());
    write(out, device.state());
    write_changing(device, out);
  }

 private:
  static void write_changing(const csd::Device& device, MessageWriter& out) {
    out.text(device.client_metadata());
    write(out, device.info());
  }
  void read_changing(MessageReader& in) {
    metadata_ = in.text();
    info_ = read_info(in);
    info_.elsewhere = here_ == nullptr;
    info_.rank = teller_.owner();
    SI_CHECK(in.ok(), "a device's description that was cut off");
  }
  template <typename Call>
  Status change(const Call& call) {
    SI_ASSIGN_OR_RETURN(const std::string told, teller_.tell([&](MessageWriter& out) -> Status {
      SI_RETURN_IF_ERROR(call());
      write_changing(*here_, out);
      return Status();
    }));
    MessageReader in(told);
    read_changing(in);
    return Status();
  }

  const Teller teller_;
  const std::unique_ptr<csd::Device> here_;
  csd::DeviceInfo info_;
  storage::StoreLayout layout_;
  storage::StoreState state_;  // as it was opened
  std::string metadata_;       // as it was recovered
};

class SharedSource final : public DeviceSource {
 public:
  SharedSource(std::unique_ptr<DeviceSource> source, Teller teller)
      : source_(std::move(source)), teller_(std::move(teller)) {}

  const std::string& name() const override { return source_->name(); }
  uint32_t rank() const override { return teller_.owner(); }

  /// The same path of another machine is another place.
  std::string place() const override {
    auto told = teller_.tell([&](MessageWriter& out) {
      std::array<char, 256> host{};
      (void)::gethostname(host.data(), host.size() - 1);
      out.text(fmt::format("{}:{}", host.data(), source_->place()));
      return Status();
    });
    // Whatever fails fails again in the next call.
    return told.ok() ? MessageReader(*told).text() : source_->name();
  }

  Result<std::optional<storage::StoreState>> peek() override {
    SI_ASSIGN_OR_RETURN(const std::string told, teller_.tell([&](MessageWriter& out) -> Status {
      SI_ASSIGN_OR_RETURN(const std::optional<storage::StoreState> state, source_->peek());
      out.value(uint8_t{state.has_value()});
      if (state) write(out, *state);
      return Status();
    }));
    MessageReader in(told);
    if (in.value<uint8_t>() == 0) return std::optional<storage::StoreState>();
    return std::optional(read_state(in));
  }

  Result<std::unique_ptr<csd::Snapshot>> snapshot(storage::ReaderLock lock) override {
    std::unique_ptr<csd::Snapshot> here;
    SI_ASSIGN_OR_RETURN(const std::string told, teller_.tell([&](MessageWriter& out) -> Status {
      SI_ASSIGN_OR_RETURN(here, source_->snapshot(lock));
      write(out, here->layout());
      write(out, here->state());
      out.text("");
      return Status();
    }));
    MessageReader in(told);
    storage::StoreLayout layout = read_layout(in);
    return std::unique_ptr<csd::Snapshot>(std::make_unique<ToldSnapshot>(
        teller_, std::move(here), source_->name(), std::move(layout), in));
  }

  Result<double> bandwidth() override {
    return number<double>([&] { return source_->bandwidth(); });
  }
  Result<uint64_t> capacity_bytes() override {
    return number<uint64_t>([&] { return source_->capacity_bytes(); });
  }

  Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                              const DeviceShare& share) override {
    // Each rank has drawn an id for the run: the first one's counts.
    storage::StoreLayout agreed = layout;
    SI_RETURN_IF_ERROR(broadcast(teller_.ranks(), Channel::kControl,
                                 std::as_writable_bytes(std::span(agreed.run.bytes)), 0));
    return opened([&] { return source_->create(agreed, share); });
  }
  Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) override {
    return opened([&] { return source_->open(share); });
  }
  Status erase() override {
    return teller_.tell_status([&] { return source_->erase(); });
  }

 private:
  template <typename Number, typename Ask>
  Result<Number> number(const Ask& ask) {
    SI_ASSIGN_OR_RETURN(const std::string told, teller_.tell([&](MessageWriter& out) -> Status {
      SI_ASSIGN_OR_RETURN(const Number number, ask());
      out.value(number);
      return Status();
    }));
    return MessageReader(told).value<Number>();
  }
  template <typename Open>
  Result<std::unique_ptr<csd::Device>> opened(const Open& open) {
    std::unique_ptr<csd::Device> device;
    SI_ASSIGN_OR_RETURN(const std::string told, teller_.tell([&](MessageWriter& out) -> Status {
      SI_ASSIGN_OR_RETURN(device, open());
      SharedDevice::describe(*device, out);
      return Status();
    }));
    return std::unique_ptr<csd::Device>(
        std::make_unique<SharedDevice>(teller_, std::move(device), told));
  }

  const std::unique_ptr<DeviceSource> source_;
  const Teller teller_;
};

}  // namespace

DeviceSources share_sources(DeviceSources sources, const std::vector<uint32_t>& rank_of,
                            std::shared_ptr<Collectives> ranks) {
  DeviceSources shared;
  for (size_t i = 0; i < sources.size(); ++i) {
    shared.push_back(
        std::make_unique<SharedSource>(std::move(sources[i]), Teller(ranks, rank_of[i])));
  }
  return shared;
}

}  // namespace smartinf::engine
