#include "smartinf/plan/cache_placement.h"

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

TEST(CachePlacement, SequencesAreSharedOutByBandwidth) {
  std::vector<CacheDevice> devices = {{3, 0}, {1, 0}, {1.5, 0}};
  for (int i = 0; i < 110; ++i) devices[cache_placement(devices, 10).front()].bytes_used += 10;
  EXPECT_EQ(devices[0].bytes_used, 600u);
  EXPECT_EQ(devices[1].bytes_used, 200u);
  EXPECT_EQ(devices[2].bytes_used, 300u);
}

TEST(CachePlacement, EveryDeviceIsOfferedIt) {
  const std::vector<CacheDevice> devices = {{1, 100}, {1, 0}, {1, 0}, {4, 1000}};
  EXPECT_EQ(cache_placement(devices, 8), (std::vector<size_t>{1, 2, 0, 3}));
}

}  // namespace
}  // namespace smartinf::plan
