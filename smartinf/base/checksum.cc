#include "smartinf/base/checksum.h"

#include <xxhash.h>
#ifdef SMARTINF_XXH_DISPATCH
#include <xxh_x86dispatch.h>  // makes XXH3_* choose AVX2 or AVX-512 at run time: the same values
#endif

namespace smartinf::base {

uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

}  // namespace smartinf::base
