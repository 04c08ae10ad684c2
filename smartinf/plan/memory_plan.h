// How the memory budget is divided: subgroup size, slots, and the engine's own buffer. Pure
// functions: the engine and its devices take what they say, and `smartinf plan` says the same
// without a device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/base/units.h"

namespace smartinf::plan {

/// The memory budget of a run that sets none: slots and staging of all devices together.
inline constexpr uint64_t kMemoryBudgetBytes = 512 * base::kMiB;

/// Elements of a subgroup at most, where its size is chosen here. A plane of so many f32 elements
/// is one transfer of 4 MiB: large enough for a drive's full rate, small enough that filling and
/// draining the pipeline is a small part of a step.
inline constexpr uint64_t kSubgroupElementsMax = uint64_t{1} << 20;

struct MemoryPlanInput {
  uint64_t budget_bytes = kMemoryBudgetBytes;
  uint64_t elements = 0;  // of the parameter space
  uint32_t devices = 1;
  base::StateFormat format = base::StateFormat::kF32;
  std::vector<base::PlaneKind> planes;  // the update rule's, and a residual
  uint32_t gradient_spill_bytes = 0;    // per element; a spilled gradient is read into the slot too
  uint64_t subgroup_elements = 0;       // 0: chosen here
  uint32_t weight_read_slots = 0;       // of each device; room for a master plane
};

struct MemoryPlan {
  uint64_t subgroup_elements = 0;  // a multiple of base::kBlockElements
  uint64_t slot_bytes = 0;
  uint32_t slots = 0;          // of each device
  uint64_t device_bytes = 0;   // of each device: slots and those for reading weights
  uint64_t staging_bytes = 0;  // the engine's own: initialization, reading state, casting gradients
};

/// Fewer slots than this cannot overlap reading with writing.
inline constexpr uint32_t kSlotsMin = 2;
/// Fewer slots are not worth saving memory for.
inline constexpr uint32_t kSlotsEnough = 6;
/// Slots of a device at most; more do not help.
inline constexpr uint32_t kSlotsMax = 32;

/// Weights that a device reads at once, where they do not stay in memory: one is cast while others
/// are on their way, and a drive is busy with few transfers of a subgroup's length.
inline constexpr uint32_t kWeightReadSlots = 4;

/// Errors: kOutOfMemory with the smallest budget that would do.
base::Result<MemoryPlan> plan_memory(const MemoryPlanInput& input);

/// Bytes that the planes of so many elements take on the drive.
uint64_t state_bytes(base::StateFormat format, std::span<const base::PlaneKind> planes,
                     uint64_t elements);

struct DeviceSlotsInput {
  uint64_t memory_bytes = 0;  // of this device: MemoryPlan::slots of them
  uint64_t slot_bytes = 0;
  uint64_t subgroups = 0;
  uint32_t slots = 0;  // asked for; 0: chosen here
  /// Bytes of transfers that fill the drive, one way: storage's io_bytes times io_depth.
  uint64_t in_flight_bytes = 0;
  bool gradients_spilled = false;
};

/// Slots that a device allocates; 0: there is no memory for one.
uint64_t device_slots(const DeviceSlotsInput& input);

/// What is known of devices before they are opened.
struct DriveSlots {
  uint32_t slots = 0;                       // as in DeviceSlotsInput
  uint64_t in_flight_bytes = ~uint64_t{0};  // likewise; by default as many as there is memory for
};

/// Bytes of the buffers of all devices and the engine.
uint64_t buffer_bytes(const MemoryPlan& plan, uint64_t elements, uint32_t devices,
                      const DriveSlots& drives = {});

/// Whether a state cache of so many bytes leaves room for `other_bytes`, the engine's buffers and
/// gradients. Errors: kOutOfMemory with the numbers.
base::Status check_state_cache(uint64_t cache_bytes, uint64_t other_bytes, uint64_t host_bytes);

/// The engine's own buffer where state exists and none has to be written.
uint64_t staging_bytes_to_read();

}  // namespace smartinf::plan
