#include "smartinf/serve/remote_device.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/serve/remote_snapshot.h"
#include "smartinf/serve/samples.h"

namespace smartinf::serve::wire {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

/// Memory of the caller's, copied: what is sent again after a break is not his any more.
Payload copy_of(const void* data, uint64_t bytes) {
  auto copy = std::make_shared_for_overwrite<std::byte[]>(bytes);
  if (bytes > 0) std::memcpy(copy.get(), data, bytes);
  const std::span<const std::byte> view(copy.get(), bytes);
  return {std::move(copy), view};
}

class RemoteDevice final : public csd::Device {
 public:
  RemoteDevice(std::string name, Endpoint endpoint, RemoteOptions options,
               std::unique_ptr<ClientSession> session, Attached attached,
               std::vector<compress::MatrixLayout> matrices)
      : endpoint_(std::move(endpoint)),
        options_(std::move(options)),
        info_(std::move(attached.info)),
        layout_(std::move(attached.layout)),
        matrices_(std::move(matrices)),
        standing_(std::move(attached.standing)),
        vitals_(attached.vitals),
        session_(std::move(session)) {
    constexpr std::string_view kLocal = "local";  // to its server
    const std::string kind = std::move(info_.kind);
    info_.kind = "remote" + (kind.starts_with(kLocal) ? kind.substr(kLocal.size()) : " " + kind);
    info_.name = std::move(name);
    for (size_t i = 0; i < layout_.subgroups.size(); ++i) index_[layout_.subgroups[i].id] = i;
    session_->start(
        {[this](const Down& down, const InFrame& frame) { return on_frame(down, frame); },
         [this](const Status& why) { on_lost(why); }});
  }
  ~RemoteDevice() override {
    const uint64_t sent = session_->bytes_sent();
    const uint64_t received = session_->bytes_received();
    const uint32_t connections = session_->connections();
    session_->close();
    base::log(base::LogLevel::kInfo,
              fmt::format("device {}: {} bytes sent and {} received over {} connection{}",
                          info_.name, sent, received, connections, connections == 1 ? "" : "s"));
    on_lost(Status(ErrorCode::kCancelled, "the device is closing"));
  }

  const csd::DeviceInfo& info() const override { return info_; }
  const storage::StoreLayout& layout() const override { return layout_; }
  storage::StoreState state() const override {
    const std::lock_guard lock(mutex_);
    return standing_.state;
  }
  std::string client_metadata() const override {
    const std::lock_guard lock(mutex_);
    return standing_.client_metadata;
  }
  Status recover_to(base::StepNumber step) override { return call(RecoverTo{step}); }
  Status cache_state(std::span<const base::SubgroupId> subgroups) override {
    if (subgroups.empty()) return Status();
    SI_RETURN_IF_ERROR(call(CacheState{{subgroups.begin(), subgroups.end()}}));
    const std::lock_guard lock(mutex_);
    info_.state_cache_bytes = standing_.state_cache_bytes;
    info_.cached_subgroups = standing_.cached_subgroups;
    return Status();
  }
  void submit(csd::Command& command) override {
    std::visit([&](const auto& message) { start(command, message); }, command.message);
  }
  base::TrafficReading host_traffic() const override {
    const std::lock_guard lock(mutex_);
    return vitals_.host;
  }
  base::TrafficReading store_traffic() const override {
    const std::lock_guard lock(mutex_);
    return vitals_.store;
  }
  uint64_t bytes_written_ever() const override {
    const std::lock_guard lock(mutex_);
    return vitals_.written_ever;
  }
  uint64_t state_bytes_cached() const override {
    const std::lock_guard lock(mutex_);
    return vitals_.cached_bytes;
  }
  Result<std::unique_ptr<csd::Snapshot>> snapshot() override {
    return open_remote_snapshot(info_.name, endpoint_, options_, storage::ReaderLock::kLeave,
                                session_->id());
  }

 private:
  /// Where results go, and how much of them came. subgroup: its index; for the spool 0.
  struct Place {
    std::byte* memory = nullptr;
    uint64_t bytes = 0;
    uint64_t came = 0;
    std::vector<std::byte> packed;  // samples, until all of them are there
    base::Bf16* samples = nullptr;
  };
  /// A command of the caller's; a gradient may be several of the session's.
  struct Whole {
    csd::Command* command = nullptr;
    uint32_t left = 1;
    Status status;
  };
  struct Pending {
    std::shared_ptr<Whole> whole;
    std::unordered_map<uint64_t, Place> places;  // by place_key()
    Status damaged;                              // of what came
  };
  static uint64_t place_key(Target target, base::SubgroupId subgroup) {
    return uint64_t{subgroup.value} << 8 | static_cast<uint64_t>(target);
  }
  using Places = std::unordered_map<uint64_t, Place>;

  uint64_t count_of(base::SubgroupId subgroup) const {
    const auto found = index_.find(subgroup);
    return found == index_.end() ? 0 : layout_.subgroups[found->second].count;
  }

  // ---- Down to the server.

  void send(const std::shared_ptr<Whole>& whole, CommandBody body, Places places,
            std::vector<Payload> payload, uint64_t bytes) {
    const bool sent =
        session_->send(std::move(body), std::move(payload), bytes, [&](uint64_t number) {
          const std::lock_guard lock(mutex_);
          pending_.emplace(number, Pending{whole, std::move(places), {}});
        });
    Status lost;
    {
      const std::lock_guard lock(mutex_);
      lost = lost_;
    }
    if (!sent) {
      finish(whole, lost.ok() ? Status(ErrorCode::kCancelled, "the session is closing") : lost);
    } else if (!lost.ok()) {
      on_lost(lost);  // before the command was among those that it answers
    }
  }

  /// One without payload.
  void plain(csd::Command& command, CommandBody body, Places places = {}) {
    send(std::make_shared<Whole>(Whole{&command, 1, {}}), std::move(body), std::move(places), {},
         0);
  }
  void with_payload(csd::Command& command, CommandBody body, std::vector<Payload> payload) {
    const auto whole = std::make_shared<Whole>(Whole{&command, 1, {}});
    uint64_t bytes = 0;
    for (const Payload& part : payload) bytes += part.bytes.size();
    if (Status room = session_->wait_for_room(bytes); !room.ok()) return finish(whole, room);
    send(whole, std::move(body), {}, std::move(payload), bytes);
  }

  template <typename Message>
  void start(csd::Command& command, const Message& message) {  // those without memory
    plain(command, message);
  }
  void start(csd::Command& command, const csd::PutGradient& put) {
    const uint64_t element_bytes = base::data_type_bytes(put.type);
    const uint64_t piece = kPieceBytes / element_bytes;
    const uint64_t pieces = std::max<uint64_t>(1, base::divide_up(put.count, piece));
    const auto whole = std::make_shared<Whole>(Whole{&command, static_cast<uint32_t>(pieces), {}});
    for (uint64_t i = 0; i < pieces; ++i) {
      const uint64_t first = i * piece;
      const uint64_t count = std::min(piece, put.count - first);
      const uint64_t bytes = count * element_bytes;
      if (Status room = session_->wait_for_room(bytes); !room.ok()) {
        for (; i < pieces; ++i) finish(whole, room);
        return;
      }
      const auto* data = static_cast<const std::byte*>(put.gradient) + first * element_bytes;
      send(whole, Gradient{put.subgroup, put.first + first, count, put.type}, {},
           {copy_of(data, bytes)}, bytes);
    }
  }
  void start(csd::Command& command, const csd::PutCompressedGradient& put) {
    with_payload(command, CompressedGradient{put.subgroup},
                 {copy_of(put.message.data(), put.message.size())});
  }
  void start(csd::Command& command, const csd::Update& update) {
    UpdateWanted wanted{update.weights_type, update.scalars,      {},
                        update.as_completed, update.keep_updated, update.weights_on_demand};
    Places places;
    for (const csd::SubgroupUpdate& entry : update.updates) {
      wanted.updates.push_back(
          {entry.subgroup, entry.weights_out != nullptr, entry.samples_out != nullptr});
      const auto found = index_.find(entry.subgroup);
      if (found == index_.end()) continue;  // the server says so
      const storage::StoredSubgroup& subgroup = layout_.subgroups[found->second];
      if (entry.weights_out != nullptr) {
        Place& place = places[place_key(Target::kWeights, entry.subgroup)];
        place.memory = static_cast<std::byte*>(entry.weights_out);
        place.bytes = subgroup.count * base::data_type_bytes(update.weights_type);
      }
      if (entry.samples_out != nullptr) {
        Place& place = places[place_key(Target::kSamples, entry.subgroup)];
        place.samples = entry.samples_out;
        place.bytes = sizeof(base::Bf16) *
                      compress::samples_in(matrices_, subgroup.first_element, subgroup.count);
      }
    }
    plain(command, std::move(wanted), std::move(places));
  }
  void start(csd::Command& command, const csd::ReadWeights& read) {
    Places places;
    Place& place = places[place_key(Target::kWeights, read.subgroup)];
    place.memory = static_cast<std::byte*>(read.weights_out);
    place.bytes = count_of(read.subgroup) * base::data_type_bytes(read.type);
    plain(command, ReadWanted{read.subgroup, read.step, read.type}, std::move(places));
  }
  void start(csd::Command& command, const csd::ReadState& read) {
    StateWanted wanted{read.subgroup, read.first, read.count, 0};
    Places places;
    for (size_t plane = 0; plane < read.planes.size(); ++plane) {
      if (read.planes[plane] == nullptr || plane >= layout_.planes.size()) continue;
      wanted.planes |= 1u << plane;
      Place& place = places[place_key(static_cast<Target>(plane), read.subgroup)];
      place.memory = reinterpret_cast<std::byte*>(read.planes[plane]);
      place.bytes = read.count * sizeof(float);
    }
    plain(command, wanted, std::move(places));
  }
  void start(csd::Command& command, const csd::WriteState& write) {
    StateGiven given{write.subgroup, write.count, 0, write.plane_mask, write.residual != nullptr};
    std::vector<Payload> payload;
    // A wrong count is the server's to refuse, and nothing that this memory need hold.
    const bool whole = write.count == count_of(write.subgroup);
    for (size_t plane = 0; plane < write.planes.size() && whole; ++plane) {
      if (write.planes[plane] == nullptr || plane >= layout_.planes.size()) continue;
      given.planes |= 1u << plane;
      payload.push_back(copy_of(write.planes[plane], write.count * sizeof(float)));
    }
    if (write.residual != nullptr && whole) {
      payload.push_back(copy_of(write.residual, write.count * sizeof(base::Bf16)));
    }
    if (!whole) given.residual = false;
    with_payload(command, given, std::move(payload));
  }
  /// What goes over the network need not be aligned; the interface says that it is.
  bool refused(csd::Command& command, const std::byte* memory) {
    if (reinterpret_cast<uintptr_t>(memory) % base::kIoAlignment == 0) return false;
    finish(std::make_shared<Whole>(Whole{&command, 1, {}}),
           Status(ErrorCode::kInvalidArgument,
                  fmt::format("memory of what is spooled must be a multiple of {}",
                              base::kIoAlignment)));
    return true;
  }
  void start(csd::Command& command, const csd::PutSpool& put) {
    if (refused(command, put.bytes.data())) return;
    with_payload(command, SpoolGiven{put.offset_bytes},
                 {copy_of(put.bytes.data(), put.bytes.size())});
  }
  void start(csd::Command& command, const csd::GetSpool& get) {
    if (refused(command, get.out.data())) return;
    Places places;
    Place& place = places[place_key(Target::kSpool, {})];
    place.memory = get.out.data();
    place.bytes = get.out.size();
    plain(command, SpoolWanted{get.offset_bytes, get.out.size()}, std::move(places));
  }

  /// Sends what is no command of the interface's and waits for its end.
  Status call(CommandBody body) {
    csd::CompletionQueue replies;
    csd::Command command{csd::Flush{}, &replies, nullptr};
    plain(command, std::move(body));
    csd::Completion completion;
    const std::chrono::duration<double> bound(options_.deadline_seconds +
                                              options_.reconnect_seconds);
    const auto wait = std::chrono::duration_cast<std::chrono::nanoseconds>(bound);
    if (!replies.pop(completion, wait)) {
      on_lost(Status(ErrorCode::kTimeout,
                     fmt::format("server {}, device {} gave no answer for {}", endpoint_.address,
                                 endpoint_.device, base::format_seconds(bound.count())),
                     "See the server's log and the network between."));
      // Whoever has taken it from the pending ones, on_lost() or on_done(), pushes it, and uses
      // both until then.
      while (!replies.pop(completion, std::chrono::seconds(1))) {
      }
    }
    return completion.status;
  }

  // ---- Up from the server, on the session's thread.

  Status on_frame(const Down& down, const InFrame& frame) {
    if (const auto* data = std::get_if<DataFrame>(&down.body)) return on_data(*data, frame);
    if (const auto* ready = std::get_if<ReadyFrame>(&down.body)) return on_ready(*ready);
    if (const auto* life = std::get_if<VitalsFrame>(&down.body)) {
      const std::lock_guard lock(mutex_);
      vitals_ = life->vitals;
      return Status();
    }
    return on_done(std::get<DoneFrame>(down.body));
  }

  Status on_data(const DataFrame& data, const InFrame& frame) {
    const std::lock_guard lock(mutex_);
    const auto pending = pending_.find(data.command);
    if (pending == pending_.end()) {
      return lost_.ok() ? wrong("results of no command") : Status();
    }
    const auto found = pending->second.places.find(place_key(data.target, data.subgroup));
    if (found == pending->second.places.end()) return wrong("results that were not asked for");
    Place& place = found->second;
    // In order, so that what has come is all there up to a point.
    if (data.offset_bytes != place.came || frame.payload_bytes() > place.bytes - place.came) {
      return wrong("results out of order");
    }
    if (place.memory == nullptr && place.packed.empty()) place.packed.resize(place.bytes);
    std::byte* out = place.memory != nullptr ? place.memory : place.packed.data();
    const uint64_t checksum =
        frame.copy_payload({out + place.came, frame.payload_bytes()}, data.offset_bytes);
    place.came += frame.payload_bytes();
    if (checksum != data.checksum && pending->second.damaged.ok()) {
      pending->second.damaged =
          Status(ErrorCode::kCorrupt,
                 fmt::format("what server {} sent of subgroup {} is not what came",
                             endpoint_.address, data.subgroup.value),
                 "It was damaged on its way or in a memory: check both machines' (the step can be "
                 "repeated).");
    }
    return Status();
  }

  /// All that was to come for a subgroup.
  bool complete(Pending& pending, base::SubgroupId subgroup) {
    for (const Target target : {Target::kWeights, Target::kSamples}) {
      const auto found = pending.places.find(place_key(target, subgroup));
      if (found == pending.places.end()) continue;
      Place& place = found->second;
      if (place.came != place.bytes) return false;
      if (place.samples == nullptr) continue;
      const std::span<const base::Bf16> packed(
          reinterpret_cast<const base::Bf16*>(place.packed.data()),
          place.packed.size() / sizeof(base::Bf16));
      const storage::StoredSubgroup& stored = layout_.subgroups[index_.at(subgroup)];
      if (pending.damaged.ok() && !unpack_samples(matrices_, stored, packed, place.samples)) {
        return false;
      }
      place.packed = {};
    }
    return true;
  }

  Status on_ready(const ReadyFrame& ready) {
    csd::Command* command = nullptr;
    {
      const std::lock_guard lock(mutex_);
      vitals_ = ready.vitals;
      const auto pending = pending_.find(ready.command);
      if (pending == pending_.end()) return lost_.ok() ? wrong("weights of no update") : Status();
      if (pending->second.whole->command->as<csd::Update>() == nullptr ||
          !complete(pending->second, ready.subgroup)) {
        return wrong("weights said to be ready that did not come");
      }
      if (!pending->second.damaged.ok()) return Status();  // the update fails with it
      command = pending->second.whole->command;
    }
    command->replies->push({command, csd::Completion::Event::kWeightsReady, ready.subgroup, {}});
    return Status();
  }

  Status on_done(const DoneFrame& done) {
    Status status = done.outcome;
    std::shared_ptr<Whole> whole;
    {
      const std::lock_guard lock(mutex_);
      vitals_ = done.vitals;
      if (done.standing) standing_ = *done.standing;
      const auto pending = pending_.find(done.command);
      if (pending == pending_.end()) return lost_.ok() ? wrong("an answer to nothing") : Status();
      if (status.ok()) status = pending->second.damaged;
      const bool all = std::ranges::all_of(pending->second.places, [](const auto& entry) {
        return entry.second.came == entry.second.bytes;
      });
      const bool update = pending->second.whole->command->as<csd::Update>() != nullptr;
      if (status.ok() && !all && !update) return wrong("an answer before its results");
      whole = pending->second.whole;
      pending_.erase(pending);
    }
    session_->done(done.command);
    finish(whole, std::move(status));
    return Status();
  }

  Status wrong(const char* what) const {
    return Status(ErrorCode::kCorrupt, fmt::format("the server sent {}", what),
                  "This is a bug in smartinf; please report it.");
  }

  void finish(const std::shared_ptr<Whole>& whole, Status status) {
    {
      const std::lock_guard lock(mutex_);
      if (whole->status.ok()) whole->status = std::move(status);
      if (--whole->left > 0) return;
    }
    whole->command->replies->push({whole->command,
                                   csd::Completion::Event::kDone,
                                   {},
                                   Status(whole->status).with_context(info_.name)});
  }

  void on_lost(const Status& why) {
    std::unordered_map<uint64_t, Pending> pending;
    {
      const std::lock_guard lock(mutex_);
      if (lost_.ok()) lost_ = why;
      pending.swap(pending_);
    }
    for (auto& [number, command] : pending) finish(command.whole, why);
  }

  const Endpoint endpoint_;
  const RemoteOptions options_;
  csd::DeviceInfo info_;
  const storage::StoreLayout layout_;
  const std::vector<compress::MatrixLayout> matrices_;
  std::unordered_map<base::SubgroupId, size_t> index_;

  mutable std::mutex mutex_;
  Standing standing_;
  Vitals vitals_;
  Status lost_;
  std::unordered_map<uint64_t, Pending> pending_;  // by number

  std::unique_ptr<ClientSession> session_;
};

}  // namespace

std::unique_ptr<csd::Device> make_remote_device(std::string name, const Endpoint& endpoint,
                                                const RemoteOptions& options,
                                                std::unique_ptr<ClientSession> session,
                                                Attached attached,
                                                std::vector<compress::MatrixLayout> matrices) {
  return std::make_unique<RemoteDevice>(std::move(name), endpoint, options, std::move(session),
                                        std::move(attached), std::move(matrices));
}

}  // namespace smartinf::serve::wire
