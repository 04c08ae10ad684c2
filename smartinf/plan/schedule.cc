#include "smartinf/plan/schedule.h"

#include <algorithm>
#include <utility>

#include "smartinf/base/check.h"

namespace smartinf::plan {
namespace {

/// Appends tasks and remembers where each subgroup's writes stand.
class Builder {
 public:
  explicit Builder(const ScheduleInput& input) : input_(input), written_(input.subgroups) {
    tasks_.reserve(size_t{6} * input.subgroups);
  }

  // Positions count in the order in which subgroups are taken.
  void read(uint32_t position) {
    std::array<uint32_t, 3> after{Task::kNone, Task::kNone, Task::kNone};
    if (position >= input_.slots) after = written_[position - input_.slots];
    if (input_.variant == ScheduleVariant::kPaper && position > 0) {
      after[0] = written_[position - 1][0];
      after[1] = written_[position - 1][1];
    }
    uint32_t gradient = Task::kNone;
    if (input_.gradient_spilled) gradient = add(TaskKind::kReadGradient, position, after);
    reads_.push_back({add(TaskKind::kReadState, position, after), gradient});
  }
  void update(uint32_t position) {
    const auto [state, gradient] = reads_[position];
    const uint32_t done = add(TaskKind::kUpdate, position, {state, gradient, Task::kNone});
    const bool paper = input_.variant == ScheduleVariant::kPaper;
    const auto master = [&] {
      written_[position][1] =
          add(TaskKind::kWriteMaster, position, {done, Task::kNone, Task::kNone});
    };
    if (paper) master();  // from where the host reads new weights
    written_[position][0] = add(TaskKind::kWriteWeights, position,
                                {done, paper ? written_[position][1] : Task::kNone, Task::kNone});
    if (!paper) master();
    written_[position][2] = done;  // until moments are added
    updates_.push_back(done);
  }
  void write_moments(uint32_t position) {
    if (!input_.has_moments) return;
    std::array<uint32_t, 3> after{updates_[position], Task::kNone, Task::kNone};
    if (input_.variant == ScheduleVariant::kPaper) {
      after = {written_[position][0], written_[position][1], Task::kNone};
    }
    written_[position][2] = add(TaskKind::kWriteMoments, position, after);
  }

  /// Makes every task wait for the one before it.
  void chain() {
    for (uint32_t i = 0; i < tasks_.size(); ++i) {
      tasks_[i].after = {i > 0 ? i - 1 : Task::kNone, Task::kNone, Task::kNone};
    }
  }
  std::vector<Task> take() { return std::move(tasks_); }

 private:
  uint32_t subgroup_at(uint32_t position) const {
    return input_.order.empty() ? position : input_.order[position];
  }
  uint32_t add(TaskKind kind, uint32_t position, std::array<uint32_t, 3> after) {
    Task task;
    task.kind = kind;
    task.subgroup = subgroup_at(position);
    task.slot = base::SlotId{position % input_.slots};
    task.after = after;
    tasks_.push_back(task);
    return static_cast<uint32_t>(tasks_.size() - 1);
  }

  struct Reads {
    uint32_t state;
    uint32_t gradient;
  };
  const ScheduleInput& input_;
  std::vector<Task> tasks_;
  std::vector<Reads> reads_;                      // by position
  std::vector<uint32_t> updates_;                 // by position
  std::vector<std::array<uint32_t, 3>> written_;  // by position: what frees its slot
};

}  // namespace

std::string_view task_kind_name(TaskKind kind) {
  switch (kind) {
    case TaskKind::kReadGradient:
      return "read gradient";
    case TaskKind::kReadState:
      return "read state";
    case TaskKind::kUpdate:
      return "update";
    case TaskKind::kWriteWeights:
      return "write weights";
    case TaskKind::kWriteMaster:
      return "write master";
    case TaskKind::kWriteMoments:
      return "write moments";
  }
  return "?";
}

std::vector<Task> make_schedule(const ScheduleInput& asked) {
  SI_CHECK(asked.slots > 0, "a schedule needs a slot");
  SI_CHECK(asked.order.empty() || asked.order.size() == asked.subgroups,
           "the order must name each subgroup once");
  ScheduleInput input = asked;
  const bool naive = input.variant == ScheduleVariant::kNaive;
  if (naive) input.slots = 1;

  // With one slot nothing can stand between a subgroup's writes and the next one's read.
  const uint32_t deferred = input.slots > 1 && input.has_moments ? 1 : 0;

  Builder builder(input);
  if (input.variant == ScheduleVariant::kPaper) {
    for (uint32_t i = 0; i < input.subgroups; ++i) {
      builder.read(i);
      builder.update(i);
      builder.write_moments(i);
    }
    return builder.take();
  }
  for (uint32_t i = 0; i < std::min(input.slots, input.subgroups); ++i) builder.read(i);
  for (uint32_t i = 0; i < input.subgroups + deferred; ++i) {
    if (i < input.subgroups) builder.update(i);
    if (i < deferred) continue;
    builder.write_moments(i - deferred);
    if (i - deferred + input.slots < input.subgroups) builder.read(i - deferred + input.slots);
  }
  if (naive) builder.chain();
  return builder.take();
}

}  // namespace smartinf::plan
