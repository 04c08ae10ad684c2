#include "smartinf/plan/decode_schedule.h"

#include <algorithm>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

using testing::ElementsAre;

DecodeScheduleInput input_of(uint32_t layers, uint32_t devices = 1) {
  DecodeScheduleInput input;
  input.layers = layers;
  input.devices = devices;
  return input;
}

/// "products 0A", in order, of those that `wanted` takes.
template <typename Wanted>
std::vector<std::string> names(const std::vector<DecodeTask>& tasks, Wanted wanted) {
  std::vector<std::string> all;
  for (const DecodeTask& task : tasks) {
    if (!wanted(task)) continue;
    all.push_back(std::string(decode_work_name(task.work)) + " " + std::to_string(task.layer) +
                  (task.half == 0 ? "A" : "B"));
  }
  return all;
}

uint32_t find(const std::vector<DecodeTask>& tasks, DecodeWork work, uint32_t layer, uint32_t half,
              uint32_t device = DecodeTask::kHost, uint32_t step = 0) {
  for (uint32_t i = 0; i < tasks.size(); ++i) {
    const DecodeTask& task = tasks[i];
    if (task.work == work && task.layer == layer && task.half == half && task.device == device &&
        task.step == step) {
      return i;
    }
  }
  return ~0u;
}

/// Whether `late` waits for `early`, over others too.
bool waits(const std::vector<DecodeTask>& tasks, uint32_t late, uint32_t early) {
  std::set<uint32_t> before{late};
  for (uint32_t i = late + 1; i-- > 0;) {
    if (!before.contains(i)) continue;
    before.insert(tasks[i].after.begin(), tasks[i].after.end());
  }
  return early != late && before.contains(early);
}

TEST(DecodeSchedule, TheHostComputesOneHalfWhileDevicesAttendToTheOther) {
  DecodeScheduleInput input = input_of(2);
  const auto on_host = [](const DecodeTask& task) { return task.on_host(); };
  input.streamed = {false, true};
  EXPECT_THAT(names(make_decode_schedule(input), on_host),
              ElementsAre("products 0A", "products 0B", "tails 0A", "products 1A", "tails 0B",
                          "products 1B", "tails 1A", "tails 1B", "logits 0A", "logits 0B"));
  const auto tasks = make_decode_schedule(input_of(2));
  EXPECT_THAT(names(tasks, on_host),
              ElementsAre("products 0A", "products 0B", "tails 0A", "products 1A", "tails 0B",
                          "products 1B", "tails 1A", "logits 0A", "tails 1B", "logits 0B"));
  EXPECT_THAT(names(tasks, [](const DecodeTask& task) { return task.work == DecodeWork::kFold; }),
              ElementsAre("fold 0A", "fold 0B", "fold 1A", "fold 1B"));
  const uint32_t tails = find(tasks, DecodeWork::kTails, 0, 0);
  EXPECT_TRUE(waits(tasks, tails, find(tasks, DecodeWork::kFold, 0, 0, 0)));
  EXPECT_FALSE(waits(tasks, tails, find(tasks, DecodeWork::kFold, 0, 1, 0)));
}

TEST(DecodeSchedule, ReadsNeedNoQueries) {
  DecodeScheduleInput input = input_of(4);
  input.steps = 2;
  const auto tasks = make_decode_schedule(input);
  const uint32_t read = find(tasks, DecodeWork::kRead, 2, 0, 0);
  EXPECT_TRUE(waits(tasks, read, find(tasks, DecodeWork::kRead, 1, 1, 0)));
  EXPECT_FALSE(waits(tasks, read, find(tasks, DecodeWork::kProducts, 2, 0)));
  // Over the end of the step, too; its queries need the token.
  const uint32_t next = find(tasks, DecodeWork::kRead, 0, 0, 0, 1);
  EXPECT_FALSE(waits(tasks, next, find(tasks, DecodeWork::kLogits, 0, 0)));
  EXPECT_TRUE(waits(tasks, find(tasks, DecodeWork::kFold, 0, 0, 0, 1),
                    find(tasks, DecodeWork::kLogits, 0, 0)));
}

TEST(DecodeSchedule, WhatIsAppendedWaitsForTheReadsAndNothingForIt) {
  const auto tasks = make_decode_schedule(input_of(3, 2));
  for (const uint32_t device : {0u, 1u}) {
    const uint32_t append = find(tasks, DecodeWork::kAppend, 0, 0, device);
    EXPECT_TRUE(waits(tasks, append, find(tasks, DecodeWork::kFold, 2, 1, device)));
    for (uint32_t i = 0; i < tasks.size(); ++i) EXPECT_FALSE(waits(tasks, i, append));
  }
}

TEST(DecodeSchedule, StreamedWeightsComeAheadIntoSlots) {
  DecodeScheduleInput input = input_of(5);
  input.streamed = {false, true, true, true, true};
  input.weight_slots = 2;
  const auto tasks = make_decode_schedule(input);
  EXPECT_EQ(find(tasks, DecodeWork::kWeights, 0, 0, 0), ~0u);
  const uint32_t weights = find(tasks, DecodeWork::kWeights, 3, 0, 0);
  EXPECT_TRUE(waits(tasks, find(tasks, DecodeWork::kProducts, 3, 0), weights));
  EXPECT_TRUE(waits(tasks, weights, find(tasks, DecodeWork::kTails, 1, 1)));  // both halves
  EXPECT_FALSE(waits(tasks, weights, find(tasks, DecodeWork::kTails, 2, 0)));
  EXPECT_LT(weights, find(tasks, DecodeWork::kRead, 3, 0, 0));  // before the blocks
}

TEST(DecodeSchedule, InTurnNothingRunsBesideSomethingElse) {
  DecodeScheduleInput input = input_of(3, 2);
  input.halves = 1;
  input.in_turn = InTurn::kAll;
  input.streamed.assign(3, true);
  input.steps = 2;
  const auto tasks = make_decode_schedule(input);
  for (uint32_t late = 0; late < tasks.size(); ++late) {
    for (uint32_t early = 0; early < late; ++early) {
      const bool beside = tasks[late].device != tasks[early].device &&
                          tasks[late].work == tasks[early].work;  // devices among themselves
      const bool same = tasks[late].layer == tasks[early].layer && !tasks[late].on_host() &&
                        !tasks[early].on_host();
      EXPECT_TRUE(beside || same || waits(tasks, late, early)) << late << " " << early;
    }
  }
}

TEST(DecodeSchedule, InTurnWeightsMayComeAhead) {
  DecodeScheduleInput input = input_of(4);
  input.halves = 1;
  input.in_turn = InTurn::kAttention;
  input.streamed.assign(4, true);
  input.weight_slots = 2;
  const auto tasks = make_decode_schedule(input);
  const uint32_t weights = find(tasks, DecodeWork::kWeights, 3, 0, 0);
  EXPECT_TRUE(waits(tasks, weights, find(tasks, DecodeWork::kTails, 1, 0)));  // for its slot
  EXPECT_FALSE(waits(tasks, weights, find(tasks, DecodeWork::kFold, 2, 0, 0)));
  EXPECT_TRUE(waits(tasks, find(tasks, DecodeWork::kProducts, 3, 0), weights));
}

}  // namespace
}  // namespace smartinf::plan
