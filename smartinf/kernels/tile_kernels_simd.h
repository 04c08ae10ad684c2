// The tile stages that Highway compiled for this build and this processor supports.
#pragma once

#include <vector>

#include "smartinf/kernels/tile_kernels.h"

namespace smartinf::kernels {

/// Slowest first; named as Highway names its targets ("SSE4", "AVX2", "AVX3", "NEON").
std::vector<TileKernels> simd_tiles();

}  // namespace smartinf::kernels
