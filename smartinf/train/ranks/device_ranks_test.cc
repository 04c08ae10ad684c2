#include "smartinf/train/ranks/device_ranks.h"

#include <initializer_list>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<engine::DeviceOptions> at(std::initializer_list<const char*> paths) {
  std::vector<engine::DeviceOptions> devices;
  for (const char* path : paths) {
    engine::DeviceOptions& device = devices.emplace_back();
    device.path = path;
    device.rank = engine::kAnyRank;
  }
  return devices;
}

base::Result<std::vector<engine::DeviceOptions>> devices_of_ranks(
    const std::vector<engine::DeviceOptions>& devices, uint32_t world) {
  SI_ASSIGN_OR_RETURN(auto all, expand_rank_paths(devices, world));
  return share_out_devices(std::move(all), world);
}

/// "path rank" of each.
std::vector<std::string> placed(const std::vector<engine::DeviceOptions>& devices, uint32_t world) {
  const auto made = devices_of_ranks(devices, world);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  std::vector<std::string> lines;
  if (!made.ok()) return lines;
  for (const auto& device : *made) lines.push_back(device.path + " " + std::to_string(device.rank));
  return lines;
}

TEST(DeviceRanks, DevicesAreSharedOutInTheirOrder) {
  EXPECT_THAT(placed(at({"a", "b", "c"}), 1), ElementsAre("a 0", "b 0", "c 0"));
  EXPECT_THAT(placed(at({"a", "b", "c"}), 2), ElementsAre("a 0", "b 0", "c 1"));
  EXPECT_THAT(placed(at({"a", "b"}), 4), ElementsAre("a 0", "b 2")) << "the others have none";
}

TEST(DeviceRanks, APathCanStandForADeviceOfEveryRank) {
  EXPECT_THAT(placed(at({"x/{rank}", "y/{rank}"}), 2),
              ElementsAre("x/0 0", "y/0 0", "x/1 1", "y/1 1"));
  EXPECT_THAT(placed(at({"x/{rank}"}), 1), ElementsAre("x/0 0"));
  const auto mixed = devices_of_ranks(at({"x/{rank}", "y"}), 2);
  EXPECT_THAT(mixed.status().to_string(), HasSubstr("y has no {rank} in it"));
}

TEST(DeviceRanks, ANamedRankDrivesItsDevice) {
  auto devices = at({"a", "b"});
  devices[0].rank = 1;
  devices[1].rank = 0;
  EXPECT_THAT(placed(devices, 2), ElementsAre("a 1", "b 0"));
  EXPECT_THAT(placed(devices, 1), ElementsAre("a 0", "b 0")) << "one process drives all";
  devices[1].rank = 2;
  EXPECT_THAT(devices_of_ranks(devices, 2).status().to_string(),
              HasSubstr("device.1.rank is 2, but there are 2 ranks"));
}

}  // namespace
}  // namespace smartinf::train
