// The order of a device's work in one step, as a pure function: the transfer handler runs it on the
// real clock, the simulator on a virtual one.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"
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
  kOverlapped,  // slots in flight together; weights first, momentum and variance last
  kPaper,       // one after another, but moments are written while the next one is read; only the
                // simulator's, of the paper's machine
};
inline constexpr std::array<std::string_view, 3> kScheduleVariantNames{"naive", "overlapped",
                                                                       "paper"};
constexpr base::EnumNames enum_names(ScheduleVariant) { return kScheduleVariantNames; }
/// Schedules that the engine runs.
constexpr base::EnumNames engine_schedule_names() {
  return base::EnumNames(kScheduleVariantNames).first(2);
}

/// Work that runs beside the update of a step. kLate: the next step's forward, layer by layer as
/// their weights arrive. kEarly: backward too, by the guess that nothing is clipped; where it is
/// wrong the update is done again as kLate. The choice changes time and no bit.
enum class Overlap : uint8_t { kAuto, kNone, kLate, kEarly };
inline constexpr std::array<std::string_view, 4> kOverlapNames{"auto", "none", "late", "early"};
constexpr base::EnumNames enum_names(Overlap) { return kOverlapNames; }

/// Slots, of so many, that an update takes which begins while gradients still come in. Where they
/// are spilled the others' buffers collect them, for which it takes most: of several subgroups a
/// part may be there. 0: there are too few.
constexpr uint32_t slots_as_completed(uint32_t slots, bool gradients_spilled) {
  if (!gradients_spilled) return slots;
  return slots < 8 ? 0 : slots / 4;
}

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
  /// Subgroups in the order in which they are taken: each once, as many as there are to be. Empty:
  /// ascending, as the next forward needs them.
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
/// kPaper overlaps least: the host reads weights when their master is written, and moments stand
/// behind both, beside the next subgroup's reads. The paper's measured steps look like it
/// (docs/simulator.md). Source: Smart-Infinity, HPCA 2024, section V-B (the transfer handler).
std::vector<Task> make_schedule(const ScheduleInput& input);

}  // namespace smartinf::plan
