// How momentum and variance become bf16 or 8-bit codes and come back, one element at a time: the
// plain truth of the codecs. Every rounding is stochastic and unbiased, from a hash of (seed, step,
// element): repeatable, and equal on every instruction set. docs/numerics.md has the reasons.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "smartinf/base/checksum.h"
#include "smartinf/base/state_format.h"

namespace smartinf::kernels {

inline constexpr uint32_t kCanonicalNan = 0x7fc00000u;
inline constexpr uint32_t kInfinityBits = 0x7f800000u;
inline constexpr uint32_t kMagnitudeMask = 0x7fffffffu;

inline float canonical(float value) {
  return value != value ? std::bit_cast<float>(kCanonicalNan) : value;
}

/// The random words of one group of kQ8GroupElements elements in one step. Groups are aligned in
/// the parameter space, so the words do not depend on subgroups, devices or threads.
struct RoundingKey {
  uint32_t low = 0;
  uint32_t high = 0;
};

/// Threads: pure. `element` is the group's first, a multiple of kQ8GroupElements.
inline RoundingKey rounding_key(uint64_t seed, uint64_t step, uint64_t element) {
  const uint64_t mixed =
      base::mix_seed(base::mix_seed(seed, step), element / base::kQ8GroupElements);
  return {static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)};
}

inline constexpr uint32_t kLaneFactor = 0x9e3779b1u;
inline constexpr uint32_t kMixFactor1 = 0x7feb352du;
inline constexpr uint32_t kMixFactor2 = 0x846ca68bu;

/// 32 random bits for the group's element `lane`: the low half rounds its momentum, the high half
/// its variance. Two multiplications: a 32-bit xor-shift-multiply mixer in the manner of splitmix.
inline uint32_t rounding_bits(RoundingKey key, uint32_t lane) {
  uint32_t x = (lane * kLaneFactor) ^ key.low;
  x ^= x >> 16;
  x *= kMixFactor1;
  x ^= key.high;
  x ^= x >> 15;
  x *= kMixFactor2;
  x ^= x >> 16;
  return x;
}

inline uint32_t rounding_half(uint32_t bits, base::PlaneKind kind) {
  return kind == base::PlaneKind::kVariance ? bits >> 16 : bits & 0xffffu;
}

/// Truncation after adding 16 random bits below the kept ones: up with probability equal to the
/// fraction cut off. Infinity stays, NaN becomes canonical.
inline uint16_t round_bf16(float value, uint32_t random16) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & kMagnitudeMask) > kInfinityBits) return static_cast<uint16_t>(kCanonicalNan >> 16);
  return static_cast<uint16_t>((bits + random16) >> 16);
}

/// A 16-bit word as a number inside (0, 1).
inline float unit_interval(uint32_t random16) {
  return static_cast<float>(2 * random16 + 1) * 0x1p-17f;
}

// q8. Codes are spaced by squares: code c of a group with step s stands for c * |c| * s (momentum,
// c in -127..127) or for a standard deviation of c * c * s (variance, c in 0..255), s being the
// group's largest magnitude over 127^2 or 255^2. So values 4 (momentum) to 9 (variance) decades
// below the group's largest keep a code, where linear codes would lose them at two.
inline constexpr float kMomentumCodesSquared = 127.0f * 127.0f;
inline constexpr float kVarianceCodesSquared = 255.0f * 255.0f;

/// Groups whose largest magnitude is below this become zeros: 1/s must stay finite.
inline constexpr uint32_t kSmallestGroupBits = 0x0d800000u;  // 2^-100

/// The scale stored for a group: its step s. `magnitude_bits` is the largest (bits &
/// kMagnitudeMask) of its momenta or standard deviations. A group with an infinity or NaN becomes
/// all NaN: broken numbers must not vanish.
inline float group_step(uint32_t magnitude_bits, float codes_squared) {
  if (magnitude_bits >= kInfinityBits) return std::bit_cast<float>(kCanonicalNan);
  if (magnitude_bits < kSmallestGroupBits) return 0.0f;
  return std::bit_cast<float>(magnitude_bits) / codes_squared;
}

/// 1/s for encoding, or 0 for groups that have only zero codes.
inline float group_inverse(float step) { return step > 0 ? 1.0f / step : 0.0f; }

/// The smaller code c is floor(sqrt(y)) for y = |value| / s; c + 1 is taken with the probability
/// that makes the decoded value right on average.
inline int8_t encode_momentum(float value, float inverse, uint32_t random16) {
  if (inverse == 0) return 0;
  float y = std::fabs(value) * inverse;
  if (y > kMomentumCodesSquared) y = kMomentumCodesSquared;
  const float lower = std::floor(std::sqrt(y));
  const bool up = unit_interval(random16) * (2.0f * lower + 1.0f) < y - lower * lower;
  const auto code = static_cast<int32_t>(up ? lower + 1.0f : lower);
  return static_cast<int8_t>(std::signbit(value) ? -code : code);
}

inline float decode_momentum(int8_t code, float step) {
  const auto c = static_cast<float>(code);
  return (c * std::fabs(c)) * step;
}

/// As above for deviation = sqrt(variance), but right on average for the variance itself: it is the
/// variance that is averaged over steps. Only zero gets code 0: a variance lost while its momentum
/// is not would make the next weight jump.
inline uint8_t encode_variance(float deviation, float inverse, uint32_t random16) {
  if (inverse == 0) return 0;
  float y = deviation * inverse;
  if (y > kVarianceCodesSquared) y = kVarianceCodesSquared;
  const float lower = std::floor(std::sqrt(y));
  const float square = lower * lower;
  // (c + 1)^4 - c^4 and y^2 - c^4, as products that do not cancel.
  const float gap = (2.0f * lower + 1.0f) * (2.0f * square + (2.0f * lower + 1.0f));
  const bool up = unit_interval(random16) * gap < (y - square) * (y + square);
  const float code = up ? lower + 1.0f : lower;
  return static_cast<uint8_t>(code == 0 && y > 0 ? 1.0f : code);
}

inline float decode_variance(uint8_t code, float step) {
  const auto c = static_cast<float>(code);
  const float deviation = (c * c) * step;
  return deviation * deviation;
}

}  // namespace smartinf::kernels
