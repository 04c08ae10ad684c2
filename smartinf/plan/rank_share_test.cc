#include "smartinf/plan/rank_share.h"

#include <vector>

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

TEST(RankShare, DevicesAreSharedOutInTheirOrder) {
  const auto ranks_of = [](size_t devices, uint32_t world) {
    std::vector<uint32_t> ranks;
    for (size_t i = 0; i < devices; ++i) ranks.push_back(rank_of_device(i, devices, world));
    return ranks;
  };
  EXPECT_EQ(ranks_of(4, 2), (std::vector<uint32_t>{0, 0, 1, 1}));
  EXPECT_EQ(ranks_of(3, 2), (std::vector<uint32_t>{0, 0, 1}));
  EXPECT_EQ(ranks_of(1, 4), (std::vector<uint32_t>{0}));
  EXPECT_EQ(ranks_of(2, 4), (std::vector<uint32_t>{0, 2}));
}

TEST(RankShare, TheMostDevicesThatOneRankDrives) {
  const std::vector<uint32_t> uneven{0, 0, 1};
  EXPECT_EQ(device_sharing(uneven, 2).most, 2u);
  EXPECT_TRUE(device_sharing(uneven, 2).all_have_one);
  EXPECT_FALSE(device_sharing(uneven, 3).all_have_one);
  EXPECT_EQ(share_of_devices(300, 2, 3), 200u);
}

TEST(RankShare, MemoryIsBucketsSumsAndSubgroupsOnTheirWay) {
  // Three of 8 MiB for each bucket under way, the open one; sums of a run and a piece; 4 subgroups.
  RankExchange exchange{.elements = 1 << 30, .subgroup_elements = 1000};
  const uint64_t sums = 4 * ((1u << 20) + (1u << 17));
  EXPECT_EQ(rank_gradient_bytes(1 << 30, exchange), 7 * (8u << 20) + sums);
  EXPECT_EQ(rank_weight_bytes(exchange), 4 * (4000u + 2048));
  EXPECT_EQ(rank_bytes(1 << 30, exchange),
            rank_gradient_bytes(1 << 30, exchange) + rank_weight_bytes(exchange));
  // Of what is received a rank's own sums stay where they are.
  exchange.ranks = 2;
  EXPECT_EQ(rank_gradient_bytes(1 << 30, exchange), 5 * (8u << 20) + sums);
  exchange.ranks = 8;
  EXPECT_EQ(rank_gradient_bytes(1 << 30, exchange), 3 * (8u << 20) + 4 * (7u << 20) + sums);
  // Less than a bucket: it is the only one, three times.
  exchange = {.elements = 1000, .sums = 1, .ranks = 0};
  EXPECT_EQ(rank_gradient_bytes(1 << 30, exchange), 3 * 4000 + sums);
  // A small model's buckets are its gradients, in f32 of two ranks.
  EXPECT_EQ(rank_bucket_bytes(1000), 8000u);
}

}  // namespace
}  // namespace smartinf::plan
