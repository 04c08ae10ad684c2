// How the memory budget is divided: subgroup size, slots, and the engine's own buffer. A pure
// function, so that doctor and plan can say the same numbers without a device.
#pragma once

#include <cstdint>

#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/update_rule.h"

namespace smartinf::engine {

/// Of a subgroup that is chosen here. A plane of so many f32 elements is one transfer of 4 MiB:
/// large enough for a drive's full rate, small enough that filling and draining the pipeline is a
/// small part of a step.
inline constexpr uint64_t kSubgroupElementsMax = uint64_t{1} << 20;

struct MemoryPlanInput {
  uint64_t budget_bytes = 0;
  uint64_t elements = 0;  // of the parameter space
  uint32_t devices = 1;
  kernels::UpdateRule rule = kernels::UpdateRule::kAdamW;
  base::StateFormat format = base::StateFormat::kF32;
  bool residual = false;              // behind the rule's planes
  uint32_t gradient_spill_bytes = 0;  // per element; a spilled gradient is read into the slot too
  uint64_t subgroup_elements = 0;     // 0: chosen here
};

struct MemoryPlan {
  uint64_t subgroup_elements = 0;  // a multiple of base::kBlockElements
  uint64_t slot_bytes = 0;
  uint32_t slots = 0;          // of each device
  uint64_t staging_bytes = 0;  // the engine's own: initialization, reading state, casting gradients
};

/// Fewer slots than this cannot overlap reading with writing.
inline constexpr uint32_t kSlotsMin = 2;

/// Errors: kOutOfMemory with the smallest budget that would do.
base::Result<MemoryPlan> plan_memory(const MemoryPlanInput& input);

/// Memory of this machine in all.
uint64_t host_memory_bytes();
/// Whether a state cache of so many bytes leaves room for `other_bytes`, the engine's buffers and
/// gradients. Errors: kOutOfMemory with the numbers.
base::Status check_state_cache(uint64_t cache_bytes, uint64_t other_bytes, uint64_t host_bytes);

/// The engine's own buffer where state exists and none has to be written.
uint64_t staging_bytes_to_read();

/// Bytes that the planes of so many elements take on the drive, a residual among them or not.
uint64_t state_bytes(kernels::UpdateRule rule, base::StateFormat format, uint64_t elements,
                     bool residual = false);

}  // namespace smartinf::engine
