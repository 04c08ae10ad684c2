// Which rank drives which of a recipe's devices.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/engine/options.h"

namespace smartinf::train {

/// In a device's path: the number of the rank that drives it.
inline constexpr std::string_view kRankInPath = "{rank}";
bool names_rank(const std::string& text);
std::string with_rank(std::string text, uint32_t rank);

/// A path with kRankInPath stands for a device of every rank, rank after rank; one process is rank
/// 0. Pure. Errors: kInvalidArgument for lists where only some paths have it, or a rank was named.
base::Result<std::vector<engine::DeviceOptions>> expand_rank_paths(
    std::vector<engine::DeviceOptions> devices, uint32_t world);

/// Devices that no rank was named for are shared out in their order: device i of n is rank
/// i * world / n's. One process drives all. Pure. Errors: kInvalidArgument for a rank that there is
/// not.
base::Result<std::vector<engine::DeviceOptions>> share_out_devices(
    std::vector<engine::DeviceOptions> devices, uint32_t world);

}  // namespace smartinf::train
