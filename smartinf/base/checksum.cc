#include "smartinf/base/checksum.h"

#include <xxhash.h>
#ifdef SMARTINF_XXH_DISPATCH
#include <xxh_x86dispatch.h>  // makes XXH3_* choose AVX2 or AVX-512 at run time: the same values
#endif

namespace smartinf::base {

uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

uint64_t mix_seed(uint64_t a, uint64_t b) {
  // splitmix64's finaliser (Steele, Lea, Flood 2014) over a combination that is not symmetric.
  uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace smartinf::base
