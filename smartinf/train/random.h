// Random numbers that depend on a seed and a position only: no state to save, none to restore, and
// the same whatever order or thread asks for them.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace smartinf::train {

/// 64 well-mixed bits of (seed, position). Source: the finalizer of SplitMix64 (Steele, Lea and
/// Flood, OOPSLA 2014), applied to each of the two in turn.
inline uint64_t random_bits(uint64_t seed, uint64_t position) {
  const auto mix = [](uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  };
  return mix(mix(seed) ^ position);
}

/// In [0, 1), multiples of 2^-53.
inline double random_uniform(uint64_t seed, uint64_t position) {
  return static_cast<double>(random_bits(seed, position) >> 11) * 0x1p-53;
}

/// Standard normal, by Box and Muller.
inline double random_normal(uint64_t seed, uint64_t position) {
  const double radius = 1 - random_uniform(seed, 2 * position);  // in (0, 1]
  const double angle = random_uniform(seed, 2 * position + 1);
  return std::sqrt(-2 * std::log(radius)) * std::cos(2 * std::numbers::pi * angle);
}

}  // namespace smartinf::train
