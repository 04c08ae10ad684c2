#include "smartinf/plan/row_queues.h"

#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

/// How many of so many rows were there; the others have come.
uint32_t bring(RowQueues& queues, uint32_t first, uint32_t count, RowUse use) {
  uint32_t found = 0;
  for (uint32_t row = first; row < first + count; ++row) {
    if (queues.find(row, use) != RowQueues::kNone) {
      ++found;
    } else {
      (void)queues.insert(row, use);
    }
  }
  return found;
}

TEST(RowQueues, ARowHasItsSlotUntilItLeavesAndKeptRowsStay) {
  for (const uint32_t capacity : {0u, 1u, 2u, 7u, 64u}) {
    RowQueues queues(capacity);
    std::mt19937 random(capacity);
    std::map<uint32_t, uint32_t> place_of;  // of rows as they came
    std::set<uint32_t> kept;
    const auto there = [&](uint32_t row) {
      return queues.find(row, RowUse::kBeside) != RowQueues::kNone;
    };
    for (uint32_t i = 0; i < 20'000; ++i) {
      const auto row = static_cast<uint32_t>(random() % (capacity * 2 + 3));
      const auto use = static_cast<RowUse>(random() % 3);
      const uint32_t what = random() % 256;
      if (what == 0) {
        queues.release_all();
        kept.clear();
      } else if (what == 1) {
        queues.clear();
        kept.clear();
        place_of.clear();
      } else if (what < 10) {
        queues.erase(row);
        kept.erase(row);
        place_of.erase(row);
      } else if (what < 40) {
        queues.release(row);
        kept.erase(row);
      } else if (const uint32_t found = queues.find(row, use); found != RowQueues::kNone) {
        ASSERT_EQ(found, place_of.at(row));
        if (use == RowUse::kOfStep) kept.insert(row);
      } else if (const uint32_t place = queues.insert(row, use); place == RowQueues::kNone) {
        ASSERT_EQ(kept.size(), capacity);
      } else {
        ASSERT_LT(place, capacity);
        std::erase_if(place_of, [&](const auto& one) { return one.second == place; });
        place_of[row] = place;
        if (use == RowUse::kOfStep) kept.insert(row);
      }
      for (const uint32_t one : kept) ASSERT_TRUE(there(one));
      for (const auto& [one, place] : place_of) {
        ASSERT_EQ(queues.find(one, RowUse::kBeside), place);
      }
    }
  }
}

TEST(RowQueues, RowsThatComeOnceDoNotPushOutThoseThatComeAgain) {
  RowQueues queues(200);
  uint32_t found = 0;
  for (uint32_t step = 0; step < 12; ++step) {
    // Two hundred others come between.
    (void)bring(queues, 1000 + step * 100, 100, RowUse::kOfStep);
    if (step % 2 == 1) found = bring(queues, 0, 50, RowUse::kOfStep);
    queues.release_all();
  }
  EXPECT_EQ(found, 50u);
  // Nor do they where a row is used again before it leaves for the first time.
  queues.clear();
  for (uint32_t step = 0; step < 2; ++step) (void)bring(queues, 0, 50, RowUse::kLookup);
  (void)bring(queues, 1000, 300, RowUse::kLookup);
  EXPECT_EQ(bring(queues, 0, 50, RowUse::kLookup), 50u);
}

TEST(RowQueues, ALookupAndItsUpdateAreOneUse) {
  RowQueues queues(200);
  for (uint32_t step = 0; step < 8; ++step) {
    EXPECT_EQ(bring(queues, 1000 + step * 100, 100, RowUse::kOfStep), 0u);
    EXPECT_EQ(bring(queues, 1000 + step * 100, 100, RowUse::kOfStep), 100u);  // another micro batch
    EXPECT_EQ(bring(queues, 1000 + step * 100, 100, RowUse::kBeside), 100u);
    queues.release_all();
  }
  // None of those that came once has gone to the main queue: each left with the next ones.
  EXPECT_EQ(bring(queues, 1000, 600, RowUse::kBeside), 0u);
}

TEST(RowQueues, RowsReadAheadStayUntilTheyAreLookedUp) {
  RowQueues queues(200);
  for (uint32_t step = 0; step < 2; ++step) (void)bring(queues, 1000, 200, RowUse::kLookup);
  for (uint32_t step = 0; step < 8; ++step) {
    (void)bring(queues, step * 100, 100, RowUse::kBeside);
    EXPECT_EQ(bring(queues, step * 100, 100, RowUse::kOfStep), 100u) << step;
    queues.release_all();
  }
}

}  // namespace
}  // namespace smartinf::plan
