// 64-bit checksums (XXH3) over data together with its identity, so that a block that is intact but
// in the wrong place, or of the wrong step, is found too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace smartinf::base {

/// XXH3-64 of the bytes, seeded. Equal on every machine. Threads: pure.
uint64_t checksum(std::span<const std::byte> bytes, uint64_t seed = 0);

/// Mixes two words into one seed; the order matters.
/// Source: splitmix64's finaliser (Steele, Lea, Flood 2014) over a combination that is not
/// symmetric.
constexpr uint64_t mix_seed(uint64_t a, uint64_t b) {
  uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace smartinf::base
