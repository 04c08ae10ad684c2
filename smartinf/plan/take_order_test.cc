#include "smartinf/plan/take_order.h"

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

constexpr uint32_t kNone = TakeOrder::kNone;

/// Entries of subgroups 10, 11, ... in a step of 20; at_once: those that need not be asked for.
TakeOrder started(UpdateMode mode, const std::vector<bool>& at_once,
                  const std::vector<uint32_t>& updated = {}) {
  TakeOrder order;
  order.begin_step(20);
  for (const uint32_t subgroup : updated) order.updated(subgroup);
  std::vector<TakeOrder::Entry> entries;
  for (size_t i = 0; i < at_once.size(); ++i) {
    entries.push_back({static_cast<uint32_t>(10 + i), at_once[i]});
  }
  order.start(mode, entries);
  return order;
}

TEST(TakeOrder, InOrderEachPlaceHasItsEntry) {
  TakeOrder order = started(UpdateMode::kInOrder, {true, false, true}, {11});
  EXPECT_EQ(order.take(1, {}), 1u);
  EXPECT_EQ(order.take(0, {}), 0u);
  EXPECT_TRUE(order.open());
  EXPECT_EQ(order.take(2, {}), 2u);
  EXPECT_FALSE(order.open());
  EXPECT_EQ(order.take(3, {}), kNone);
  EXPECT_FALSE(order.stop());
  EXPECT_FALSE(order.release());
}

TEST(TakeOrder, TheRestIsWhatTheStepHasNotUpdated) {
  TakeOrder order = started(UpdateMode::kRest, {true, true, true, true}, {10, 12});
  EXPECT_EQ(order.take(0, {}), 1u);
  EXPECT_EQ(order.take(1, {}), 3u);
  EXPECT_FALSE(order.open());
}

TEST(TakeOrder, AsCompletedTheLastOneFirst) {
  TakeOrder order = started(UpdateMode::kAsCompleted, {true, true, true});
  EXPECT_EQ(order.take(0, {}), kNone) << "no gradient is complete";
  order.completed(10);
  order.completed(12);
  order.completed(5);  // is not in this update
  EXPECT_EQ(order.take(0, {}), 2u);
  EXPECT_EQ(order.take(1, {}), 0u);
  EXPECT_EQ(order.take(2, {}), kNone);
  EXPECT_TRUE(order.open());
  EXPECT_TRUE(order.stop());
  order.completed(11);
  EXPECT_EQ(order.take(2, {}), kNone);
  EXPECT_FALSE(order.open());
}

TEST(TakeOrder, OnDemandWaitsForThoseThatNobodyHasAPlaceFor) {
  TakeOrder order = started(UpdateMode::kOnDemand, {false, false, true, false});
  const std::vector<uint32_t> asked{13, 11};
  EXPECT_EQ(order.take(0, asked), 2u) << "one before those that are asked for";
  EXPECT_EQ(order.take(1, asked), 3u) << "asked for first";
  EXPECT_EQ(order.take(2, asked), 1u) << "13 is taken already";
  EXPECT_EQ(order.take(3, asked), kNone);
  EXPECT_TRUE(order.open());
  EXPECT_TRUE(order.release());
  EXPECT_EQ(order.take(3, {}), 0u);
  EXPECT_FALSE(order.open());
}

TEST(TakeOrder, AStepThatBeginsForgetsTheOneBefore) {
  TakeOrder order = started(UpdateMode::kAsCompleted, {true});
  order.completed(10);
  order.updated(10);
  order.begin_step(20);
  EXPECT_EQ(order.start(UpdateMode::kRest, {{10, true}}), 1u);
  order.begin_step(20);
  order.start(UpdateMode::kAsCompleted, {{10, true}});
  EXPECT_EQ(order.take(0, {}), kNone);
}

}  // namespace
}  // namespace smartinf::plan
