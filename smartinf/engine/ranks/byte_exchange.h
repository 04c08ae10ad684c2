// Bytes of any size from every rank to every other.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/engine/ranks/collectives.h"

namespace smartinf::engine {

/// to: what goes to each rank, by rank. Returns what came from each. call, mine: as of agree();
/// where one rank has failed nothing is sent, and all get its error.
base::Result<std::vector<std::vector<std::byte>>> exchange(
    Collectives& ranks, Channel channel, std::string_view call, const base::Status& mine,
    std::span<const std::vector<std::byte>> to);

}  // namespace smartinf::engine
