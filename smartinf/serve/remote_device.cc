#include "smartinf/serve/remote_device.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/device_space.h"
#include "smartinf/serve/remote_snapshot.h"
#include "smartinf/serve/said_state.h"
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
               const csd::DeviceSpace& space)
      : endpoint_(std::move(endpoint)),
        options_(std::move(options)),
        info_(std::move(attached.info)),
        space_(space),
        standing_(std::move(attached.standing)),
        vitals_(attached.vitals),
        session_(std::move(session)) {
    constexpr std::string_view kLocal = "local";  // to its server
    const std::string kind = std::move(info_.kind);
    info_.kind = "remote" + (kind.starts_with(kLocal) ? kind.substr(kLocal.size()) : " " + kind);
    info_.name = std::move(name);
    info_.of_other_rank = false;  // which is nothing that a server knows
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
  const storage::StoreLayout& layout() const override { return space_.layout(); }
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
    std::visit([&](auto& message) { start(command, message); }, command.message);
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
  /// Where results go, and how much of them came.
  struct Place {
    std::byte* memory = nullptr;
    uint64_t bytes = 0;
    base::SubgroupId subgroup;
    base::Bf16* samples = nullptr;  // of the whole space, in place of memory
    uint64_t came = 0;
    std::vector<std::byte> packed = {};  // samples, until all of them are there
  };
  using Places = std::vector<Place>;
  /// A command of the caller's; a gradient may be several of the session's.
  struct PendingCommand {
    csd::Command* command = nullptr;
    uint32_t left = 1;
    Status status;
  };
  struct Pending {
    std::shared_ptr<PendingCommand> whole;
    Places places;
    std::unordered_set<base::SubgroupId> unready;  // of an update, whose weights are to come
    uint64_t room = 0;                             // of the session's window
    Status damaged = {};                           // of what came
  };
  /// The memory of a message (csd/messages/step.h).
  struct MemoryList {
    const csd::DeviceSpace& space;
    std::vector<Payload> payload = {};
    Places places = {};
    std::unordered_set<base::SubgroupId> unready = {};

    template <typename T>
    void down(const T* memory, uint64_t bytes) {
      if (memory != nullptr) payload.push_back(copy_of(memory, bytes));
    }
    void down(std::span<const std::byte> memory) { down(memory.data(), memory.size()); }
    template <typename T>
    void up(T* memory, uint64_t bytes, base::SubgroupId subgroup) {
      if (memory == nullptr) return;
      places.push_back({reinterpret_cast<std::byte*>(memory), bytes, subgroup});
    }
    void up(std::span<std::byte> memory, base::SubgroupId subgroup) {
      up(memory.data(), memory.size(), subgroup);
    }
    void samples(base::Bf16* memory, base::SubgroupId subgroup) {
      if (memory == nullptr) return;
      const storage::StoredSubgroup& stored = *space.find(subgroup);
      const uint64_t count =
          compress::samples_in(space.matrices(), stored.first_element, stored.count);
      places.push_back({nullptr, count * sizeof(base::Bf16), subgroup, memory});
    }
  };

  // ---- Down to the server.

  /// False: there was no room for it; it has ended with that.
  bool send(const std::shared_ptr<PendingCommand>& whole, CommandBody body, MemoryList memory) {
    uint64_t bytes = 0;
    for (const Payload& part : memory.payload) bytes += part.bytes.size();
    if (Status room = session_->wait_for_room(bytes); !room.ok()) {
      finish(whole, std::move(room));
      return false;
    }
    const bool sent =
        session_->send(std::move(body), std::move(memory.payload), [&](uint64_t number) {
          const std::lock_guard lock(mutex_);
          pending_.emplace(
              number, Pending{whole, std::move(memory.places), std::move(memory.unready), bytes});
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
    return true;
  }

  template <typename One>
  void start(csd::Command& command, One& message) {
    const auto whole = std::make_shared<PendingCommand>(PendingCommand{&command, 1, {}});
    if (Status wrong = csd::check(message, space_); !wrong.ok()) return finish(whole, wrong);
    if constexpr (std::is_same_v<One, csd::PutGradient>) {
      send_in_pieces(whole, message);
    } else {
      send_one(whole, message);
    }
  }
  template <typename One>
  bool send_one(const std::shared_ptr<PendingCommand>& whole, One& message) {
    MemoryList memory{space_};
    csd::memory(memory, message, space_);
    if constexpr (std::is_same_v<One, csd::Update>) {
      for (const csd::SubgroupUpdate& one : message.updates) memory.unready.insert(one.subgroup);
    }
    if constexpr (std::is_same_v<One, csd::BeginStep>) {
      const std::lock_guard lock(mutex_);
      ready_early_.clear();
    }
    return send(whole, csd::Message(message), std::move(memory));
  }
  /// The server keeps a gradient's pieces no longer than it takes to put them.
  void send_in_pieces(const std::shared_ptr<PendingCommand>& whole, const csd::PutGradient& put) {
    const uint64_t element_bytes = base::data_type_bytes(put.type);
    const uint64_t piece = kPieceBytes / element_bytes;
    const uint64_t pieces = std::max<uint64_t>(1, base::divide_up(put.count, piece));
    whole->left = static_cast<uint32_t>(pieces);
    bool room = true;
    for (uint64_t i = 0; i < pieces; ++i) {
      // The others end with the one that found none.
      if (!room) {
        finish(whole, Status());
        continue;
      }
      const uint64_t first = i * piece;
      csd::PutGradient some = put;
      some.first += first;
      some.count = std::min(piece, put.count - first);
      some.gradient = static_cast<const std::byte*>(put.gradient) + first * element_bytes;
      room = send_one(whole, some);
    }
  }

  /// Sends what is no command of the interface's and waits for its end.
  Status call(CommandBody body) {
    csd::CompletionQueue replies;
    csd::Command command{csd::Flush{}, &replies, nullptr};
    send(std::make_shared<PendingCommand>(PendingCommand{&command, 1, {}}), std::move(body),
         MemoryList{space_});
    csd::Completion completion;
    const std::chrono::duration<double> bound(options_.deadline_seconds +
                                              options_.reconnect_seconds);
    const auto wait = std::chrono::duration_cast<std::chrono::nanoseconds>(bound);
    if (!replies.pop(completion, wait)) {
      on_lost(Status(ErrorCode::kTimeout,
                     fmt::format("server {}, device {} gave no answer for {}", endpoint_.address,
                                 endpoint_.device, base::format_seconds(bound.count())),
                     "See the server's log and the network between."));
      // The thread that has taken it from the pending ones, on_lost() or on_done(), pushes it, and
      // uses both until then.
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
    if (data.place >= pending->second.places.size()) {
      return wrong("results that were not asked for");
    }
    Place& place = pending->second.places[data.place];
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
                             endpoint_.address, place.subgroup.value),
                 "It was damaged on its way or in a memory: check both machines' (the step can be "
                 "repeated).");
    }
    return Status();
  }

  /// All that was to come for a subgroup.
  bool complete(Pending& pending, base::SubgroupId subgroup) {
    for (Place& place : pending.places) {
      if (place.subgroup != subgroup) continue;
      if (place.came != place.bytes) return false;
      if (place.samples == nullptr) continue;
      const std::span<const base::Bf16> packed(
          reinterpret_cast<const base::Bf16*>(place.packed.data()),
          place.packed.size() / sizeof(base::Bf16));
      const storage::StoredSubgroup& stored = *space_.find(subgroup);
      if (pending.damaged.ok() &&
          !unpack_samples(space_.matrices(), stored, packed, place.samples)) {
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
      if (pending->second.unready.erase(ready.subgroup) == 0 ||
          !complete(pending->second, ready.subgroup)) {
        return wrong("weights said to be ready that did not come");
      }
      if (mode_of(pending->second) == plan::UpdateMode::kAsCompleted) {
        ready_early_.insert(ready.subgroup);
      }
      if (!pending->second.damaged.ok()) return Status();  // the update fails with it
      command = pending->second.whole->command;
    }
    command->replies->push({command, csd::Completion::Event::kWeightsReady, ready.subgroup, {}});
    return Status();
  }

  static std::optional<plan::UpdateMode> mode_of(const Pending& pending) {
    const auto* update = pending.whole->command->as<csd::Update>();
    return update == nullptr ? std::nullopt : std::optional(update->mode);
  }
  /// All weights that were to come have. One as gradients are completed may end before; what it
  /// has made is not made again by one of the rest.
  bool updated(const Pending& pending) const {
    const plan::UpdateMode mode = *mode_of(pending);
    return mode == plan::UpdateMode::kAsCompleted ||
           std::ranges::all_of(pending.unready, [&](base::SubgroupId subgroup) {
             return mode == plan::UpdateMode::kRest && ready_early_.contains(subgroup);
           });
  }

  Status on_done(const DoneFrame& done) {
    Status status = done.outcome;
    std::shared_ptr<PendingCommand> whole;
    uint64_t room = 0;
    {
      const std::lock_guard lock(mutex_);
      vitals_ = done.vitals;
      if (done.standing) {
        const storage::StoreState& state = done.standing->state;
        if (!check_said(state).ok() || !same_device(state, standing_.state)) {
          return wrong("the state of another device");
        }
        standing_ = *done.standing;
      }
      const auto pending = pending_.find(done.command);
      if (pending == pending_.end()) return lost_.ok() ? wrong("an answer to nothing") : Status();
      if (status.ok()) status = pending->second.damaged;
      const bool all = std::ranges::all_of(
          pending->second.places, [](const Place& place) { return place.came == place.bytes; });
      if (status.ok() && !(mode_of(pending->second) ? updated(pending->second) : all)) {
        return wrong("an answer before its results");
      }
      whole = pending->second.whole;
      room = pending->second.room;
      pending_.erase(pending);
    }
    session_->done(room);
    finish(whole, std::move(status));
    return Status();
  }

  Status wrong(const char* what) const {
    return Status(ErrorCode::kCorrupt, fmt::format("the server sent {}", what),
                  "This is a bug in smartinf; please report it.");
  }

  void finish(const std::shared_ptr<PendingCommand>& whole, Status status) {
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
  const csd::DeviceSpace space_;

  mutable std::mutex mutex_;
  Standing standing_;
  Vitals vitals_;
  Status lost_;
  std::unordered_map<uint64_t, Pending> pending_;     // by number
  std::unordered_set<base::SubgroupId> ready_early_;  // of the step, as gradients were completed

  std::unique_ptr<ClientSession> session_;
};

}  // namespace

std::unique_ptr<csd::Device> make_remote_device(std::string name, const Endpoint& endpoint,
                                                const RemoteOptions& options,
                                                std::unique_ptr<ClientSession> session,
                                                Attached attached, const csd::DeviceShare& share) {
  const csd::DeviceSpace space(std::move(attached.layout), share, attached.info.spool_bytes);
  return std::make_unique<RemoteDevice>(std::move(name), endpoint, options, std::move(session),
                                        std::move(attached), space);
}

}  // namespace smartinf::serve::wire
