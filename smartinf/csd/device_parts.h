// State that the parts of a local device share: the store and who drives it, the processor, the
// slots.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "smartinf/base/traffic.h"
#include "smartinf/csd/gradient_memory.h"
#include "smartinf/csd/options.h"
#include "smartinf/csd/processor.h"
#include "smartinf/csd/slot.h"
#include "smartinf/csd/state_cache.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

/// Owned by the local device, which outlives its parts. Threads: the device's I/O thread, but for
/// what is constant after opening.
struct DeviceParts {
  std::string name;
  LocalDeviceOptions options;
  storage::Store* store = nullptr;
  GradientMemory* gradients = nullptr;
  Processor* processor = nullptr;
  StateCache cache;
  std::span<Slot> slots;
  std::unordered_map<base::SubgroupId, uint32_t> index_of;  // subgroup -> index in the layout
  base::TrafficCounter host_traffic;
  uint32_t transfers_in_flight = 0;

  // Tracks of the trace, when there is one. Transfers of one track overlap.
  uint32_t read_track = 0;
  uint32_t write_track = 0;
  uint32_t step_track = 0;
  uint32_t up_track = 0;  // of the host link where it is not emulated: that has tracks of its own
  uint32_t down_track = 0;

  /// Adds the tracks of the trace, when there is one.
  void add_tracks();

  /// Cached subgroups are not written in a step.
  bool postpones_writes() const { return store->durability() == storage::Durability::kNone; }

  /// The planes that updates read and write.
  uint32_t state_mask() const { return (1u << store->layout().state_planes().size()) - 1; }

  /// Index in the layout. Errors: kInvalidArgument for a subgroup of another device.
  base::Result<uint32_t> find(base::SubgroupId subgroup) const;

  /// Why updates cannot begin while gradients still come in (plan::UpdateMode::kAsCompleted); ok:
  /// they can.
  base::Status updates_as_completed() const;
  /// The slots for such an update.
  std::span<Slot> slots_as_completed() const {
    return slots.first(plan::slots_as_completed(static_cast<uint32_t>(slots.size()),
                                                gradients->buffer_bytes() > 0));
  }

  /// Starts a transfer of a subgroup's planes or gradient between a slot and the store.
  void start(Transfer& transfer, storage::SubgroupIo::Op op, uint32_t subgroup,
             std::span<std::byte> buffer, uint32_t plane_mask);
  /// Books a completed one.
  void finished(const Transfer& transfer);
  /// Notes in the trace what crossed the host link where that is not emulated.
  void record_host(LinkDirection direction, base::TrafficKind kind, base::SubgroupId subgroup,
                   uint64_t begin_ns, uint64_t bytes) const;

  /// Counts weights that go up and books them on the host link. When they will have passed, in
  /// base::now_ns() time; 0: at once. begin_ns: when they began to, for the trace.
  uint64_t send_weights(base::SubgroupId subgroup, uint64_t begin_ns, uint64_t bytes);

  /// Answers a command; a failure names the device.
  void complete(Command& command, base::Status status) const;
};

/// A device's slots in memory that the processor brings along.
struct DeviceSlots {
  std::unique_ptr<SlotMemory> memory;
  std::span<std::byte> scratch;  // of it, that of `slots`
  std::vector<Slot> slots;       // as many as the options' budget holds and are of use
  std::vector<Slot> weights;     // LocalDeviceOptions::weight_read_slots; room for a master plane
};

/// parts.slots are those of `slots`. Errors: kOutOfMemory when the budget has no room for one.
base::Status allocate_slots(DeviceParts& parts, DeviceSlots& slots);

}  // namespace smartinf::csd
