// The order of a device's work in one step, as a pure function: the transfer handler runs it on the
// real clock, the simulator on a virtual one.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/ids.h"

namespace smartinf::plan {

enum class TaskKind : uint8_t {
  kReadGradient,  // from the store's spill area
  kReadState,     // planes into the slot
  kUpdate,        // decompress, update, cast: the processor
  kWriteWeights,  // new weights towards the host
  kWriteMaster,   // master plane back to the store
  kWriteMoments,  // remaining planes back to the store
};

std::string_view task_kind_name(TaskKind kind);

enum class ScheduleVariant : uint8_t {
  kNaive,       // read, update, write, one subgroup after another
  kOverlapped,  // slots in flight together; weights first, momentum and variance late
  kEarly,       // overlapped, in the order in which gradients become complete
  kLate,        // one after another, but moments are written while the next one is read
};

std::string_view schedule_variant_name(ScheduleVariant variant);
std::optional<ScheduleVariant> schedule_variant_from_name(std::string_view name);

/// One piece of work on one subgroup.
struct Task {
  static constexpr uint32_t kNone = ~0u;
  TaskKind kind = TaskKind::kReadState;
  uint32_t subgroup = 0;  // index into the device's own subgroups
  base::SlotId slot;
  std::array<uint32_t, 3> after{kNone, kNone, kNone};  // tasks that must be done first
};

struct ScheduleInput {
  ScheduleVariant variant = ScheduleVariant::kOverlapped;
  uint32_t subgroups = 0;
  uint32_t slots = 1;  // the naive variant uses one
  bool gradient_spilled = false;
  bool has_moments = true;
  /// The order in which subgroups are taken: each index once. Empty: ascending, as the next forward
  /// needs them; for kEarly descending, as backward completes their gradients.
  std::span<const uint32_t> order;
};

/// Tasks in the order in which they are to be issued; a task may start when its `after` are done,
/// which always stand before it. So both an executor that starts whatever is ready and one whose
/// resources (reads, processor, host link, writes) each work through their tasks in order come to
/// an end, whatever each task takes.
///
/// Every subgroup is read, updated and written exactly once; a slot is reused only after the writes
/// of its former subgroup. Reads are issued `slots` subgroups ahead, so that with three slots or
/// more the reads of later subgroups and the writes of earlier ones are in flight at the same time.
/// The new weights go first, because the next forward waits for them; master follows, momentum and
/// variance stand behind the next subgroup's master.
/// kLate overlaps least: moments stand behind their own weights and master, and only beside the
/// next subgroup's reads. The paper's measured steps look like it (docs/simulator.md). Source:
/// Smart-Infinity, HPCA 2024, section V-B (the transfer handler).
std::vector<Task> make_schedule(const ScheduleInput& input);

}  // namespace smartinf::plan
