// A decode step's tasks on the machine's resources. Internal to generation.h.
#pragma once

#include <cstdint>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/sim/generation.h"

namespace smartinf::sim {

/// Memory of each device at most (engine::DeviceStoreOptions), seven eighths of it for slots.
constexpr uint64_t kCacheSlotBytes = uint64_t{64} << 20;

/// Things that devices are given: sequences; a prefix with all that share it is one.
struct CachePieces {
  uint64_t count = 0;
  uint64_t bytes = 0;  // of one, at its longest
};
CachePieces cache_pieces(const plan::CacheModel& cache, const GenerationOptions& options);

/// Devices of one kind, with the pieces of the one that has most.
struct GroupLoad {
  const DeviceGroup* group = nullptr;
  uint64_t pieces = 0;
  uint64_t first_half = 0;  // of these
};
/// Shared out by rate and room (plan::place), and into two halves. Errors: kNoSpace.
base::Result<std::vector<GroupLoad>> group_loads(const CachePieces& pieces, const Machine& machine);

/// Bytes of weights that a step reads from the devices.
uint64_t streamed_weight_bytes(const ModelShape& model, const GenerationOptions& options,
                               const GenerationNeed& need);

/// Two steps, one after another, and the times of the second; without prefill_s. options.inputs is
/// a number.
base::Result<GenerationTimes> run_generation_step(const ModelShape& model, const Machine& machine,
                                                  const GenerationOptions& options,
                                                  const GenerationNeed& need);

}  // namespace smartinf::sim
