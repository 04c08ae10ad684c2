#include "smartinf/train/window_order.h"

#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace smartinf::train {
namespace {

TEST(WindowOrder, EveryEpochIsAPermutation) {
  for (const uint64_t windows : {1ull, 2ull, 3ull, 4ull, 5ull, 15ull, 16ull, 17ull, 1000ull}) {
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      std::set<uint64_t> seen;
      for (uint64_t i = 0; i < windows; ++i)
        seen.insert(window_at(7, windows, epoch * windows + i));
      EXPECT_EQ(seen.size(), windows);
      EXPECT_EQ(*seen.rbegin(), windows - 1);
    }
  }
}

TEST(WindowOrder, FollowsFromTheSeedAndDiffersBetweenEpochs) {
  const auto epoch = [](uint64_t seed, uint64_t number) {
    std::vector<uint64_t> order;
    for (uint64_t i = 0; i < 100; ++i) order.push_back(window_at(seed, 100, number * 100 + i));
    return order;
  };
  EXPECT_EQ(epoch(1, 0), epoch(1, 0));
  EXPECT_NE(epoch(1, 0), epoch(1, 1));
  EXPECT_NE(epoch(1, 0), epoch(2, 0));
}

}  // namespace
}  // namespace smartinf::train
