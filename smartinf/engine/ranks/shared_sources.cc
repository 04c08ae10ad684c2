#include "smartinf/engine/ranks/shared_sources.h"

#include <array>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "smartinf/base/check.h"
#include "smartinf/csd/describe.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/engine/ranks/messages.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

/// Report of a device that was opened.
struct DeviceReport {
  storage::StoreLayout layout;
  storage::StoreState state;
  std::string client_metadata;
  csd::DeviceInfo info;
};
template <typename Wire>
void describe(Wire& wire, DeviceReport& report) {
  auto& [layout, state, client_metadata, info] = report;
  wire(layout, state, client_metadata, info);
}
DeviceReport report_of(const csd::Device& device) {
  return {device.layout(), device.state(), device.client_metadata(), device.info()};
}

/// Likewise of a snapshot.
struct SnapshotReport {
  storage::StoreLayout layout;
  storage::StoreState state;
  std::string client_metadata;
};
template <typename Wire>
void describe(Wire& wire, SnapshotReport& report) {
  auto& [layout, state, client_metadata] = report;
  wire(layout, state, client_metadata);
}

/// Answers of the rank that has a device, on all ranks.
class OwnerBroadcast {
 public:
  OwnerBroadcast(std::shared_ptr<Collectives> ranks, uint32_t owner)
      : ranks_(std::move(ranks)), owner_(owner) {}

  bool here() const { return ranks_->rank() == owner_; }
  uint32_t rank() const { return owner_; }
  Collectives& ranks() const { return *ranks_; }

  /// Answer of the device: what here_it_is() -> Result<Answer> gives on its rank.
  template <typename Answer, typename Ask>
  Result<Answer> ask(const Ask& here_it_is) const {
    std::string text;
    Answer answer{};
    Status status;
    if (here()) {
      Result<Answer> given = here_it_is();
      status = given.status();
      if (given.ok()) answer = std::move(*given);
      text = pack(status, answer);
    }
    SI_RETURN_IF_ERROR(broadcast(*ranks_, Channel::kControl, text, owner_));
    if (!here()) SI_RETURN_IF_ERROR(unpack(text, status, answer));
    if (!status.ok()) return std::move(status).with_context(fmt::format("rank {}", owner_));
    return answer;
  }
  template <typename Ask>
  Status ask_status(const Ask& here_it_is) const {
    return ask<bool>([&]() -> Result<bool> {
             SI_RETURN_IF_ERROR(here_it_is());
             return true;
           })
        .status();
  }

 private:
  std::shared_ptr<Collectives> ranks_;
  uint32_t owner_;
};

/// State of another rank's device. Its blocks are not to be had here.
class RemoteRankSnapshot : public csd::Snapshot {
 public:
  RemoteRankSnapshot(std::string name, SnapshotReport report)
      : metadata_(std::move(report.client_metadata)),
        name_(std::move(name)),
        layout_(std::move(report.layout)),
        state_(report.state) {}
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

/// The same of a device that nobody has opened: its metadata come when the step is chosen.
class AnnouncedSnapshot final : public RemoteRankSnapshot {
 public:
  /// here: null on other ranks.
  AnnouncedSnapshot(OwnerBroadcast owner, std::unique_ptr<csd::Snapshot> here, std::string name,
                    SnapshotReport report)
      : RemoteRankSnapshot(std::move(name), std::move(report)),
        owner_(std::move(owner)),
        here_(std::move(here)) {}
  Status choose_step(base::StepNumber step) override {
    SI_ASSIGN_OR_RETURN(metadata_, owner_.ask<std::string>([&]() -> Result<std::string> {
      SI_RETURN_IF_ERROR(here_->choose_step(step));
      return here_->client_metadata();
    }));
    return Status();
  }

 private:
  const OwnerBroadcast owner_;
  const std::unique_ptr<csd::Snapshot> here_;
};

/// A device of some rank: the thing itself, or what stands for it.
class SharedDevice final : public csd::Device {
 public:
  /// here: null on other ranks. report: what its rank says of it.
  SharedDevice(OwnerBroadcast owner, std::unique_ptr<csd::Device> here, DeviceReport report)
      : owner_(std::move(owner)), here_(std::move(here)) {
    take(std::move(report));
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
    SI_ASSIGN_OR_RETURN(SnapshotReport report,
                        owner_.ask<SnapshotReport>([&]() -> Result<SnapshotReport> {
                          SI_ASSIGN_OR_RETURN(made, here_->snapshot());
                          return SnapshotReport{layout_, made->state(), here_->client_metadata()};
                        }));
    if (made != nullptr) return made;
    return std::unique_ptr<csd::Snapshot>(
        std::make_unique<RemoteRankSnapshot>(info_.name, std::move(report)));
  }

 private:
  void take(DeviceReport report) {
    layout_ = std::move(report.layout);
    state_ = report.state;
    metadata_ = std::move(report.client_metadata);
    info_ = std::move(report.info);
    info_.of_other_rank = here_ == nullptr;
    info_.rank = owner_.rank();
  }
  template <typename Call>
  Status change(const Call& call) {
    SI_ASSIGN_OR_RETURN(DeviceReport report,
                        owner_.ask<DeviceReport>([&]() -> Result<DeviceReport> {
                          SI_RETURN_IF_ERROR(call());
                          return report_of(*here_);
                        }));
    take(std::move(report));
    return Status();
  }

  const OwnerBroadcast owner_;
  const std::unique_ptr<csd::Device> here_;
  csd::DeviceInfo info_;
  storage::StoreLayout layout_;
  storage::StoreState state_;  // as it was opened
  std::string metadata_;       // as it was recovered
};

class SharedSource final : public DeviceSource {
 public:
  SharedSource(std::unique_ptr<DeviceSource> source, OwnerBroadcast owner)
      : source_(std::move(source)), owner_(std::move(owner)) {}

  const std::string& name() const override { return source_->name(); }
  uint32_t rank() const override { return owner_.rank(); }

  /// The same path of another machine is another place.
  std::string place() const override {
    const auto name = owner_.ask<std::string>([&]() -> Result<std::string> {
      std::array<char, 256> host{};
      (void)::gethostname(host.data(), host.size() - 1);
      return fmt::format("{}:{}", host.data(), source_->place());
    });
    // A failure comes again in the next call.
    return name.ok() ? *name : source_->name();
  }

  Result<std::optional<storage::StoreState>> peek() override {
    return owner_.ask<std::optional<storage::StoreState>>([&] { return source_->peek(); });
  }

  Result<std::unique_ptr<csd::Snapshot>> snapshot(storage::ReaderLock lock) override {
    std::unique_ptr<csd::Snapshot> here;
    SI_ASSIGN_OR_RETURN(SnapshotReport report,
                        owner_.ask<SnapshotReport>([&]() -> Result<SnapshotReport> {
                          SI_ASSIGN_OR_RETURN(here, source_->snapshot(lock));
                          return SnapshotReport{here->layout(), here->state(), {}};
                        }));
    return std::unique_ptr<csd::Snapshot>(std::make_unique<AnnouncedSnapshot>(
        owner_, std::move(here), source_->name(), std::move(report)));
  }

  Result<double> bandwidth() override {
    return owner_.ask<double>([&] { return source_->bandwidth(); });
  }
  Result<uint64_t> capacity_bytes() override {
    return owner_.ask<uint64_t>([&] { return source_->capacity_bytes(); });
  }

  Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                              const DeviceShare& share) override {
    // Each rank has drawn an id for the run: the first one's counts.
    storage::StoreLayout agreed = layout;
    SI_RETURN_IF_ERROR(broadcast(owner_.ranks(), Channel::kControl,
                                 std::as_writable_bytes(std::span(agreed.run.bytes)), 0));
    return opened([&] { return source_->create(agreed, share); });
  }
  Result<std::unique_ptr<csd::Device>> open(const DeviceShare& share) override {
    return opened([&] { return source_->open(share); });
  }
  Status erase() override {
    return owner_.ask_status([&] { return source_->erase(); });
  }

 private:
  template <typename Open>
  Result<std::unique_ptr<csd::Device>> opened(const Open& open) {
    std::unique_ptr<csd::Device> device;
    SI_ASSIGN_OR_RETURN(DeviceReport report,
                        owner_.ask<DeviceReport>([&]() -> Result<DeviceReport> {
                          SI_ASSIGN_OR_RETURN(device, open());
                          return report_of(*device);
                        }));
    return std::unique_ptr<csd::Device>(
        std::make_unique<SharedDevice>(owner_, std::move(device), std::move(report)));
  }

  const std::unique_ptr<DeviceSource> source_;
  const OwnerBroadcast owner_;
};

}  // namespace

DeviceSources share_sources(DeviceSources sources, const std::vector<uint32_t>& rank_of,
                            std::shared_ptr<Collectives> ranks) {
  DeviceSources shared;
  for (size_t i = 0; i < sources.size(); ++i) {
    shared.push_back(
        std::make_unique<SharedSource>(std::move(sources[i]), OwnerBroadcast(ranks, rank_of[i])));
  }
  return shared;
}

}  // namespace smartinf::engine
