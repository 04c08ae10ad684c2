// 64-bit checksums (XXH3) over data together with its identity, so that a block that is intact but
// in the wrong place, or of the wrong step, is found too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "smartinf/base/arithmetic.h"  // mix_seed(), for the identities

namespace smartinf::base {

/// XXH3-64 of the bytes, seeded. Equal on every machine. Threads: pure.
uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed = 0);

}  // namespace smartinf::base
