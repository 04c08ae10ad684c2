#include "smartinf/plan/placement.h"

#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

using base::DeviceId;
using base::ErrorCode;

std::vector<Subgroup> equal_subgroups(uint32_t n, uint64_t elements) {
  std::vector<Subgroup> result;
  for (uint32_t i = 0; i < n; ++i) result.push_back({base::SubgroupId{i}, i * elements, elements});
  return result;
}

std::vector<uint64_t> loads(const std::vector<Subgroup>& subgroups,
                            const std::vector<DeviceId>& owner, size_t devices) {
  std::vector<uint64_t> load(devices, 0);
  for (size_t i = 0; i < owner.size(); ++i) load[owner[i].value] += subgroups[i].count;
  return load;
}

TEST(Placement, SharesInProportionToBandwidth) {
  const auto subgroups = equal_subgroups(100, 1000);
  const std::vector<DeviceCapacity> devices = {{2.0, ~0ull}, {1.0, ~0ull}, {1.0, ~0ull}};
  const auto owner = place(subgroups, devices);
  ASSERT_TRUE(owner.ok());
  const auto load = loads(subgroups, *owner, 3);
  EXPECT_EQ(load, (std::vector<uint64_t>{50000, 25000, 25000}));
}

TEST(Placement, EveryPrefixOfTheSpaceIsSharedOutToo) {
  const auto subgroups = equal_subgroups(97, 1000);
  const std::vector<DeviceCapacity> devices = {{3.0, ~0ull}, {1.5, 20000}, {0.7, ~0ull}};
  const auto owner = place(subgroups, devices);
  ASSERT_TRUE(owner.ok());
  const auto total = loads(subgroups, *owner, 3);
  std::vector<double> so_far(3, 0);
  for (size_t i = 0; i < owner->size(); ++i) {
    so_far[(*owner)[i].value] += 1000;
    for (size_t d = 0; d < 3; ++d) {
      const double due = static_cast<double>(total[d]) * static_cast<double>(i + 1) / 97.0;
      EXPECT_LE(std::abs(so_far[d] - due), 2000.0) << "device " << d << " at subgroup " << i;
    }
  }
}

TEST(Placement, FullDevicesPassTheRestOn) {
  const auto subgroups = equal_subgroups(10, 1000);
  const std::vector<DeviceCapacity> devices = {{1.0, 2500}, {1.0, ~0ull}, {2.0, 3999}};
  const auto owner = place(subgroups, devices);
  ASSERT_TRUE(owner.ok());
  EXPECT_EQ(loads(subgroups, *owner, 3), (std::vector<uint64_t>{2000, 5000, 3000}));
}

TEST(Placement, StagesHaveABlockTogetherAtMost) {
  constexpr uint64_t kBlock = base::kBlockElements;
  const auto subgroups = equal_subgroups(3, 8 * kBlock);
  // A head that is the embedding, in the first 100 elements, and stages that meet in a block.
  const std::vector<RankSpan> stages = {
      {0, 100, 1, 1}, {0, 13 * kBlock + 7, 0, 1}, {13 * kBlock + 7, 11 * kBlock - 7, 1, 1}};
  const auto cut = cut_by_stage(subgroups, stages);
  std::vector<uint64_t> blocks;
  for (size_t i = 0; i < cut.size(); ++i) {
    EXPECT_EQ(cut[i].id.value, i);
    EXPECT_EQ(cut[i].first, i == 0 ? 0 : cut[i - 1].first + cut[i - 1].count);
    blocks.push_back(cut[i].count / kBlock);
  }
  EXPECT_EQ(blocks, (std::vector<uint64_t>{1, 7, 5, 1, 2, 8}));
  const auto owner =
      place_by_stage(cut, std::vector<DeviceCapacity>{{1, ~0ull, 0}, {1, ~0ull, 1}}, stages);
  ASSERT_TRUE(owner.ok());
  std::vector<uint32_t> devices;
  for (const base::DeviceId device : *owner) devices.push_back(device.value);
  EXPECT_EQ(devices, (std::vector<uint32_t>{0, 0, 0, 1, 1, 1})) << "who has most of a block";
  EXPECT_EQ(cut_by_stage(subgroups, {}).size(), subgroups.size());
}

TEST(Placement, SaysHowMuchIsMissing) {
  const auto subgroups = equal_subgroups(10, 1000);
  const std::vector<DeviceCapacity> devices = {{1.0, 2500}, {1.0, 6000}};
  const auto status = place(subgroups, devices).status();
  EXPECT_EQ(status.code(), ErrorCode::kNoSpace);
  EXPECT_NE(status.what().find("8500 of 10000 parameters"), std::string::npos) << status.what();
  // Enough in sum, but not in whole subgroups.
  const std::vector<DeviceCapacity> halves = {{1.0, 4999}, {1.0, 5999}};
  EXPECT_EQ(place(subgroups, halves).status().code(), ErrorCode::kNoSpace);
}

TEST(Placement, RefusesNoDeviceAndSenselessRates) {
  const auto subgroups = equal_subgroups(2, 10);
  EXPECT_EQ(place(subgroups, {}).status().code(), ErrorCode::kInvalidArgument);
  for (const double rate : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    const std::vector<DeviceCapacity> devices = {{rate, ~0ull}};
    EXPECT_EQ(place(subgroups, devices).status().code(), ErrorCode::kInvalidArgument) << rate;
  }
}

TEST(Placement, AddingADeviceMovesOnlyItsShare) {
  const auto subgroups = equal_subgroups(90, 1000);
  std::vector<DeviceCapacity> devices = {{1.0, ~0ull}, {1.0, ~0ull}};
  const auto before = place(subgroups, devices);
  ASSERT_TRUE(before.ok());
  devices.push_back({1.0, ~0ull});
  const auto after = place(subgroups, devices, *before);
  ASSERT_TRUE(after.ok());
  EXPECT_EQ(loads(subgroups, *after, 3), (std::vector<uint64_t>{30000, 30000, 30000}));
  size_t moved = 0;
  for (size_t i = 0; i < after->size(); ++i) {
    if ((*after)[i] == (*before)[i]) continue;
    ++moved;
    EXPECT_EQ((*after)[i].value, 2u) << "an old device's subgroup went to an old device";
  }
  EXPECT_EQ(moved, 30u);
}

TEST(Placement, LosingADeviceMovesOnlyWhatItHeld) {
  const auto subgroups = equal_subgroups(90, 1000);
  std::vector<DeviceCapacity> devices(3, DeviceCapacity{1.0, ~0ull});
  const auto before = place(subgroups, devices);
  ASSERT_TRUE(before.ok());
  devices.pop_back();
  const auto after = place(subgroups, devices, *before);
  ASSERT_TRUE(after.ok());
  for (size_t i = 0; i < after->size(); ++i) {
    if ((*before)[i].value < 2) {
      EXPECT_EQ((*after)[i], (*before)[i]);
    }
  }
  EXPECT_EQ(loads(subgroups, *after, 2), (std::vector<uint64_t>{45000, 45000}));
}

}  // namespace
}  // namespace smartinf::plan
