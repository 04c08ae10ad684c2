#include "smartinf/plan/state_cache.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

/// Seconds of the slowest device, in subgroups moved over its bandwidth.
double slowest(std::span<const CachedDevice> devices, std::span<const uint64_t> cached,
               bool writes_too) {
  double most = 0;
  for (size_t d = 0; d < devices.size(); ++d) {
    const double moved = 2.0 * static_cast<double>(devices[d].subgroups) -
                         (writes_too ? 2.0 : 1.0) * static_cast<double>(cached[d]);
    most = std::max(most,
                    moved * static_cast<double>(devices[d].subgroup_bytes) / devices[d].bandwidth);
  }
  return most;
}

TEST(StateCache, TakesWhatTheBudgetHoldsAndNoMore) {
  const std::vector<CachedDevice> one = {{100, 12, 1}};
  EXPECT_EQ(share_state_cache(one, 0, false), std::vector<uint64_t>{0});
  EXPECT_EQ(share_state_cache(one, 11, false), std::vector<uint64_t>{0});
  EXPECT_EQ(share_state_cache(one, 12 * 50 + 11, false), std::vector<uint64_t>{50});
  EXPECT_EQ(share_state_cache(one, ~uint64_t{0}, false), std::vector<uint64_t>{100});
  EXPECT_TRUE(share_state_cache({}, 100, false).empty());
  const std::vector<CachedDevice> with_empty = {{0, 12, 1}, {4, 12, 1}};
  EXPECT_EQ(share_state_cache(with_empty, 24, false), (std::vector<uint64_t>{0, 2}));
}

TEST(StateCache, EqualDevicesGetEqualShares) {
  const std::vector<CachedDevice> devices(3, {40, 12, 1e9});
  EXPECT_EQ(share_state_cache(devices, 12 * 60, false), (std::vector<uint64_t>{20, 20, 20}));
  EXPECT_EQ(share_state_cache(devices, 12 * 61, false), (std::vector<uint64_t>{21, 20, 20}));
}

// A device that is loaded beyond its speed gets all until it is as fast as the rest.
TEST(StateCache, TheSlowestDeviceComesFirst) {
  const std::vector<CachedDevice> devices = {{100, 1, 1}, {100, 1, 2}};
  EXPECT_EQ(share_state_cache(devices, 60, false), (std::vector<uint64_t>{60, 0}));
  // 100 of the first saved leave it at 100 / 1, the second at 200 / 2: from there on only the
  // second can save.
  EXPECT_EQ(share_state_cache(devices, 130, false), (std::vector<uint64_t>{100, 30}));
  // Where writes are saved too the first passes the second after 50.
  EXPECT_EQ(share_state_cache(devices, 80, true), (std::vector<uint64_t>{60, 20}));
}

// No other shares of the same budget take the slowest device less time.
TEST(StateCache, NoOtherSharesAreFaster) {
  for (const bool writes_too : {false, true}) {
    for (uint64_t budget = 0; budget <= 24; ++budget) {
      const std::vector<CachedDevice> devices = {{7, 1, 1.0}, {9, 1, 1.7}, {8, 1, 0.9}};
      const auto chosen = share_state_cache(devices, budget, writes_too);
      EXPECT_EQ(std::accumulate(chosen.begin(), chosen.end(), uint64_t{0}), budget);
      double best = 1e9;
      for (uint64_t a = 0; a <= 7; ++a) {
        for (uint64_t b = 0; b <= 9 && a + b <= budget; ++b) {
          const std::vector<uint64_t> other = {a, b, std::min<uint64_t>(8, budget - a - b)};
          best = std::min(best, slowest(devices, other, writes_too));
        }
      }
      EXPECT_DOUBLE_EQ(slowest(devices, chosen, writes_too), best) << "budget " << budget;
    }
  }
}

TEST(StateCache, CachedSubgroupsAreSpreadEvenly) {
  for (const uint64_t subgroups : {1u, 7u, 48u, 100u}) {
    for (uint64_t cached = 0; cached <= subgroups; ++cached) {
      uint64_t seen = 0;
      for (uint64_t i = 0; i < subgroups; ++i) {
        seen += stays_in_memory(i, cached, subgroups) ? 1 : 0;
        // Never a whole one away from the even share.
        EXPECT_LT(std::abs(static_cast<double>(seen) -
                           static_cast<double>((i + 1) * cached) / static_cast<double>(subgroups)),
                  1.0);
      }
      EXPECT_EQ(seen, cached);
    }
  }
}

}  // namespace
}  // namespace smartinf::plan
