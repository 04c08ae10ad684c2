// The order of a device's work in one step, as a pure function: the transfer handler runs it on the
// real clock, the simulator on a virtual one.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/ids.h"

namespace smartinf::plan {

enum class TaskKind : uint8_t {
  kReadGradient,   // from the store's spill area
  kReadState,      // planes into the slot
  kUpdate,         // decompress, update, cast: the processor
  kWriteWeights,   // new weights towards the host
  kWriteMaster,    // master plane back to the store
  kWriteMoments,   // remaining planes back to the store
};

std::string_view task_kind_name(TaskKind kind);

enum class ScheduleVariant : uint8_t {
  kNaive,       // read, update, write, one subgroup after another
  kOverlapped,  // slots in flight together; weights first, momentum and variance late
  kEarly,       // overlapped, in the order in which gradients become complete
};

struct Task {
  static constexpr uint32_t kNone = ~0u;
  TaskKind kind = TaskKind::kReadState;
  uint32_t subgroup = 0;  // index into the device's own subgroups, in schedule order
  base::SlotId slot;
  std::array<uint32_t, 4> after{kNone, kNone, kNone, kNone};  // tasks that must be done first
};

struct ScheduleInput {
  ScheduleVariant variant = ScheduleVariant::kOverlapped;
  uint32_t subgroups = 0;
  uint32_t slots = 1;
  bool gradient_spilled = false;
  bool has_moments = true;
};

/// Tasks in the order in which they are to be issued; a task may start when its `after` are done.
/// Every subgroup is read, updated and written exactly once; a slot is reused only after the writes
/// of its former subgroup.
std::vector<Task> make_schedule(const ScheduleInput& input);

}  // namespace smartinf::plan
