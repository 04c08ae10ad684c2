#include "smartinf/plan/schedule.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

struct Shape {
  ScheduleVariant variant;
  uint32_t subgroups;
  uint32_t slots;
  bool spilled;
  bool moments;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const auto variant :
       {ScheduleVariant::kNaive, ScheduleVariant::kOverlapped, ScheduleVariant::kPaper}) {
    for (const uint32_t subgroups : {0u, 1u, 2u, 3u, 7u, 40u}) {
      for (const uint32_t slots : {1u, 2u, 3u, 8u, 64u}) {
        for (const bool spilled : {false, true}) {
          for (const bool moments : {false, true}) {
            all.push_back({variant, subgroups, slots, spilled, moments});
          }
        }
      }
    }
  }
  return all;
}

std::vector<Task> schedule_of(const Shape& shape) {
  ScheduleInput input;
  input.variant = shape.variant;
  input.subgroups = shape.subgroups;
  input.slots = shape.slots;
  input.gradient_spilled = shape.spilled;
  input.has_moments = shape.moments;
  return make_schedule(input);
}

bool is_read(TaskKind kind) {
  return kind == TaskKind::kReadState || kind == TaskKind::kReadGradient;
}
bool is_store_write(TaskKind kind) {
  return kind == TaskKind::kWriteMaster || kind == TaskKind::kWriteMoments;
}

TEST(Schedule, TakesEverySubgroupOnceThroughEveryTask) {
  for (const Shape& shape : shapes()) {
    std::map<TaskKind, std::set<uint32_t>> seen;
    for (const Task& task : schedule_of(shape)) {
      EXPECT_LT(task.subgroup, shape.subgroups);
      EXPECT_TRUE(seen[task.kind].insert(task.subgroup).second) << task_kind_name(task.kind);
    }
    for (const auto kind : {TaskKind::kReadState, TaskKind::kUpdate, TaskKind::kWriteWeights,
                            TaskKind::kWriteMaster}) {
      EXPECT_EQ(seen[kind].size(), shape.subgroups) << task_kind_name(kind);
    }
    EXPECT_EQ(seen[TaskKind::kReadGradient].size(), shape.spilled ? shape.subgroups : 0);
    EXPECT_EQ(seen[TaskKind::kWriteMoments].size(), shape.moments ? shape.subgroups : 0);
  }
}

TEST(Schedule, DependsOnlyOnEarlierTasks) {
  for (const Shape& shape : shapes()) {
    const std::vector<Task> tasks = schedule_of(shape);
    for (uint32_t i = 0; i < tasks.size(); ++i) {
      for (const uint32_t before : tasks[i].after) {
        EXPECT_TRUE(before == Task::kNone || before < i);
      }
    }
  }
}

/// Executes a schedule with random durations and watches what a slot goes through: a subgroup
/// enters with its reads, is updated after them, and leaves when all its writes are done.
class Machine {
 public:
  Machine(const Shape& shape, std::vector<Task> tasks, uint32_t seed)
      : shape_(shape), tasks_(std::move(tasks)), done_(tasks_.size()), random_(seed) {}

  /// in_order: each of the four resources takes its tasks in the schedule's order, one at a time.
  void run(bool in_order) {
    std::vector<uint32_t> running;
    std::vector<bool> started(tasks_.size());
    size_t finished = 0;
    while (finished < tasks_.size()) {
      std::vector<uint32_t> startable;
      std::set<int> busy;
      for (const uint32_t task : running) busy.insert(resource(tasks_[task].kind));
      for (uint32_t i = 0; i < tasks_.size(); ++i) {
        if (started[i]) continue;
        const bool is_free = !in_order || busy.insert(resource(tasks_[i].kind)).second;
        if (is_free && ready(i)) startable.push_back(i);
      }
      ASSERT_FALSE(startable.empty() && running.empty()) << "deadlock after " << finished;
      const bool start = !startable.empty() && (running.empty() || random_() % 2 == 0);
      if (start) {
        const uint32_t task = startable[random_() % startable.size()];
        started[task] = true;
        running.push_back(task);
        on_start(tasks_[task]);
      } else {
        const size_t pick = random_() % running.size();
        const uint32_t task = running[pick];
        running.erase(running.begin() + static_cast<std::ptrdiff_t>(pick));
        done_[task] = true;
        ++finished;
        on_done(tasks_[task]);
      }
      if (testing::Test::HasFatalFailure()) return;
    }
    EXPECT_TRUE(holders_.empty()) << "a slot was never given back";
  }

  uint32_t most_slots() const { return most_slots_; }
  uint32_t both_directions() const { return both_directions_; }

 private:
  static int resource(TaskKind kind) {
    if (is_read(kind)) return 0;
    if (kind == TaskKind::kUpdate) return 1;
    return kind == TaskKind::kWriteWeights ? 2 : 3;
  }
  bool ready(uint32_t task) const {
    return std::all_of(tasks_[task].after.begin(), tasks_[task].after.end(),
                       [&](uint32_t before) { return before == Task::kNone || done_[before]; });
  }
  void on_start(const Task& task) {
    const uint32_t slot = task.slot.value;
    ASSERT_LT(slot, shape_.slots);
    if (is_read(task.kind)) {
      ASSERT_TRUE(!holders_.contains(slot) || holders_[slot] == task.subgroup) << "slot in use";
      holders_[slot] = task.subgroup;
      ++reads_running_;
    } else {
      ASSERT_TRUE(holders_.contains(slot) && holders_[slot] == task.subgroup);
    }
    if (task.kind == TaskKind::kUpdate) {
      ASSERT_EQ(reads_done_[task.subgroup], shape_.spilled ? 2u : 1u) << "updated before read";
    }
    if (is_store_write(task.kind) || task.kind == TaskKind::kWriteWeights) {
      ASSERT_TRUE(updated_.contains(task.subgroup)) << "written before updated";
    }
    if (is_store_write(task.kind)) ++writes_running_;
    if (reads_running_ > 0 && writes_running_ > 0) ++both_directions_;
    most_slots_ = std::max(most_slots_, static_cast<uint32_t>(holders_.size()));
  }
  void on_done(const Task& task) {
    if (is_read(task.kind)) {
      ++reads_done_[task.subgroup];
      --reads_running_;
    } else if (task.kind == TaskKind::kUpdate) {
      updated_.insert(task.subgroup);
    } else {
      if (is_store_write(task.kind)) --writes_running_;
      if (++writes_done_[task.subgroup] == (shape_.moments ? 3u : 2u)) {
        holders_.erase(task.slot.value);
      }
    }
  }

  Shape shape_;
  std::vector<Task> tasks_;
  std::vector<bool> done_;
  std::mt19937 random_;
  std::map<uint32_t, uint32_t> holders_;  // slot -> subgroup in it
  std::map<uint32_t, uint32_t> reads_done_;
  std::map<uint32_t, uint32_t> writes_done_;
  std::set<uint32_t> updated_;
  uint32_t reads_running_ = 0;
  uint32_t writes_running_ = 0;
  uint32_t most_slots_ = 0;
  uint32_t both_directions_ = 0;
};

TEST(Schedule, NeverUsesASlotTwiceAndAlwaysEnds) {
  for (const Shape& shape : shapes()) {
    for (uint32_t seed = 0; seed < 4; ++seed) {
      SCOPED_TRACE(testing::Message()
                   << "variant " << static_cast<int>(shape.variant) << " subgroups "
                   << shape.subgroups << " slots " << shape.slots << " spilled " << shape.spilled
                   << " moments " << shape.moments << " seed " << seed);
      Machine machine(shape, schedule_of(shape), seed);
      machine.run(seed % 2 == 0);
      if (HasFatalFailure()) return;
      EXPECT_LE(machine.most_slots(), shape.slots);
    }
  }
}

TEST(Schedule, OverlappedKeepsReadsAndWritesInFlightTogether) {
  const Shape overlapped{ScheduleVariant::kOverlapped, 40, 4, false, true};
  Machine machine(overlapped, schedule_of(overlapped), 1);
  machine.run(true);
  EXPECT_GT(machine.both_directions(), 20u);
  const Shape naive{ScheduleVariant::kNaive, 40, 4, false, true};
  Machine slow(naive, schedule_of(naive), 1);
  slow.run(false);
  EXPECT_EQ(slow.both_directions(), 0u);
  EXPECT_EQ(slow.most_slots(), 1u);
}

TEST(Schedule, ThePapersReadsBehindWeightsAndMasterButBesideMoments) {
  const std::vector<Task> tasks = schedule_of({ScheduleVariant::kPaper, 10, 2, false, true});
  for (const Task& task : tasks) {
    if (task.kind == TaskKind::kWriteWeights) {
      EXPECT_EQ(tasks[task.after[1]].kind, TaskKind::kWriteMaster);
      EXPECT_EQ(tasks[task.after[1]].subgroup, task.subgroup);
    }
    if (task.kind != TaskKind::kReadState || task.subgroup == 0) continue;
    std::set<std::pair<TaskKind, uint32_t>> waits;
    for (const uint32_t before : task.after) {
      if (before != Task::kNone) waits.insert({tasks[before].kind, tasks[before].subgroup});
    }
    EXPECT_TRUE(waits.contains({TaskKind::kWriteWeights, task.subgroup - 1}));
    EXPECT_TRUE(waits.contains({TaskKind::kWriteMaster, task.subgroup - 1}));
    EXPECT_FALSE(waits.contains({TaskKind::kWriteMoments, task.subgroup - 1}));
    if (task.subgroup > 1) {
      EXPECT_TRUE(waits.contains({TaskKind::kWriteMoments, task.subgroup - 2}));
    }
  }
}

TEST(Schedule, SendsWeightsFirstAndMomentsBehindTheNextMaster) {
  const std::vector<Task> tasks = schedule_of({ScheduleVariant::kOverlapped, 10, 4, false, true});
  const auto place = [&](TaskKind kind, uint32_t subgroup) {
    return std::find_if(tasks.begin(), tasks.end(), [&](const Task& task) {
      return task.kind == kind && task.subgroup == subgroup;
    });
  };
  for (uint32_t i = 0; i < 9; ++i) {
    EXPECT_LT(place(TaskKind::kWriteWeights, i), place(TaskKind::kWriteMaster, i));
    EXPECT_LT(place(TaskKind::kWriteMaster, i + 1), place(TaskKind::kWriteMoments, i));
  }
}

TEST(Schedule, FollowsTheOrderGiven) {
  const std::vector<uint32_t> order{2, 0, 3, 1};
  ScheduleInput input;
  input.subgroups = 4;
  input.slots = 2;
  input.order = order;
  std::vector<uint32_t> updated;
  for (const Task& task : make_schedule(input)) {
    if (task.kind == TaskKind::kUpdate) updated.push_back(task.subgroup);
  }
  EXPECT_EQ(updated, order);
}

TEST(Schedule, NamesGoBothWays) {
  for (const auto variant :
       {ScheduleVariant::kNaive, ScheduleVariant::kOverlapped, ScheduleVariant::kPaper}) {
    EXPECT_EQ(base::enum_from_name<ScheduleVariant>(base::enum_name(variant)), variant);
  }
  EXPECT_FALSE(base::enum_from_name<ScheduleVariant>("fast").has_value());
  for (const std::string_view name : engine_schedule_names()) EXPECT_NE(name, "paper");
}

}  // namespace
}  // namespace smartinf::plan
