// Brings the state of a run onto other devices: another number, size, subgroup size or state
// format. Blocks of the same format are copied bit by bit, so training goes on with the same
// losses.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/stored_run.h"
#include "smartinf/plan/rank_span.h"
#include "smartinf/storage/store.h"

namespace smartinf::engine {

/// Called with how many bytes of the state are done; a failure it returns ends the work.
using StateProgress = std::function<base::Status(uint64_t bytes_done, uint64_t bytes_total)>;

struct ReshardOptions {
  base::StateFormat format = base::StateFormat::kF32;
  uint64_t subgroup_elements = 0;  // 0: the source's where the budget allows
  uint64_t memory_budget_bytes = uint64_t{256} << 20;
  /// Page-aligned buffers to copy through, instead of ones allocated from the budget: those of an
  /// updater that has the source open (Updater::scratch_memory).
  std::vector<std::span<std::byte>> scratch_memory;
  storage::Durability durability = storage::Durability::kStep;
  uint64_t seed = 0;               // of rounding, when the format changes
  std::vector<double> bandwidths;  // of the targets, relative; empty: equal
  /// Elements by the targets that are to have them, as far as there is room; ranks are those of the
  /// targets' devices. Empty: any.
  std::vector<plan::RankSpan> stages;
  /// A new run, so that old and new devices are never mixed. Only a copy that stands in for the
  /// original keeps its name.
  bool keep_run = false;
  /// Target i gets what device i of the source has. What another process has
  /// (csd::Snapshot::elsewhere) is left to it, and so is its target.
  bool keep_places = false;
  /// Whether the targets' states make room, but not before the new state is whole: it takes the old
  /// one's place in the end, so both need room. A device that cannot hold two, as a block device
  /// (DeviceSource::keeps_replaced), loses the old one once all else is ready.
  bool replace = false;
  /// As given to the new run's devices, for messages; empty: the targets'.
  std::vector<std::string> names;
  StateProgress progress;
};

struct ReshardSummary {
  storage::RunId run;
  base::StepNumber step = 0;
  uint64_t state_bytes = 0;
  uint64_t subgroup_elements = 0;
  uint64_t blocks_without_checksum = 0;  // of the source; they could not be checked
};

/// Makes new states on `targets` that hold the state of `from` at its step, with its client
/// metadata. What lies on a target's drive already stays there as far as equal shares allow: with a
/// device more, only that device's share goes to another drive. The targets are complete when it
/// returns ok; after a failure nothing is left of them, and after a crash at most what is neither
/// trained with nor in the way of another try. Memory: the budget, and the metadata of one step.
/// Errors: kAlreadyExists (a target holds a state: named), kNoSpace, kOutOfMemory (the budget holds
/// no subgroup), kCorrupt (in the source), kIo.
base::Result<ReshardSummary> reshard(StoredRun& from, const DeviceSources& targets,
                                     const ReshardOptions& options);

}  // namespace smartinf::engine
