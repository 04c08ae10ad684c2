// Which prompts begin alike, so that their common beginning is computed and kept once. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace smartinf::train {

using Prompts = std::span<const std::span<const int64_t>>;

/// For each prompt the number of its first tokens that it shares with all prompts of the same
/// number and the same first tokens, in whole parts and below all of it; 0: it shares none. Chosen
/// so that as many tokens as possible need not be computed; a prompt shares one beginning only.
/// kept: beginnings that are there already.
std::vector<uint64_t> shared_prefixes(Prompts prompts, Prompts kept, uint64_t part);

}  // namespace smartinf::train
