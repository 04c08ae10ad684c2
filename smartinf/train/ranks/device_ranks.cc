#include "smartinf/train/ranks/device_ranks.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "smartinf/plan/rank_share.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using engine::DeviceOptions;

bool names_rank(const std::string& text) { return text.find(kRankInPath) != std::string::npos; }

std::string with_rank(std::string text, uint32_t rank) {
  for (size_t at = 0; (at = text.find(kRankInPath, at)) != std::string::npos;) {
    text.replace(at, kRankInPath.size(), std::to_string(rank));
  }
  return text;
}

Result<std::vector<DeviceOptions>> expand_rank_paths(std::vector<DeviceOptions> devices,
                                                     uint32_t world) {
  if (std::ranges::none_of(devices, [](const auto& one) { return names_rank(one.path); })) {
    return devices;
  }
  std::vector<DeviceOptions> all;
  for (uint32_t rank = 0; rank < world; ++rank) {
    for (DeviceOptions device : devices) {
      if (!names_rank(device.path) || device.rank != engine::kAnyRank) {
        return Status(
            ErrorCode::kInvalidArgument,
            fmt::format("device.path: {} {}, but other devices are one for each rank", device.path,
                        device.rank != engine::kAnyRank ? "has device.rank as well"
                                                        : "has no {rank} in it"),
            "Write {rank} into all paths, or name every device and its device.rank");
      }
      device.path = with_rank(std::move(device.path), rank);
      device.name = with_rank(std::move(device.name), rank);
      all.push_back(std::move(device));
    }
  }
  return all;
}

Result<std::vector<DeviceOptions>> share_out_devices(std::vector<DeviceOptions> devices,
                                                     uint32_t world) {
  for (size_t i = 0; i < devices.size(); ++i) {
    uint32_t& rank = devices[i].rank;
    if (rank == engine::kAnyRank) rank = plan::rank_of_device(i, devices.size(), world);
    if (world == 1) rank = 0;
    if (rank < world) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("device.{}.rank is {}, but there are {} ranks", i, rank, world),
                  "Name a rank from 0, which reaches the device, or leave the key out");
  }
  return devices;
}

}  // namespace smartinf::train
