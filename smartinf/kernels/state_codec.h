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
// c in -127..127) or for the variance whose root is c * c * s (c in 0..255), s being the group's
// largest magnitude (or root) over 127^2 or 255^2. So a momentum 4 decades and a variance 9 decades
// below the group's largest keep a code, where linear codes would lose them at 2 and 4.
inline constexpr float kMomentumCodesSquared = 127.0f * 127.0f;
inline constexpr float kVarianceCodesSquared = 255.0f * 255.0f;
inline constexpr float kVarianceCodesFourth = kVarianceCodesSquared * kVarianceCodesSquared;

/// Groups whose largest momentum is below this become zeros: 1/s must stay finite.
inline constexpr uint32_t kSmallestGroupBits = 0x0d800000u;  // 2^-100

/// The scale stored for a group, its step s, from the largest (bits & kMagnitudeMask) of its
/// values. A group with an infinity or NaN becomes all NaN: broken numbers must not vanish.
inline float group_step(base::PlaneKind kind, uint32_t magnitude_bits) {
  if (magnitude_bits >= kInfinityBits) return std::bit_cast<float>(kCanonicalNan);
  const float largest = std::bit_cast<float>(magnitude_bits);
  if (kind == base::PlaneKind::kVariance) return std::sqrt(largest) / kVarianceCodesSquared;
  return magnitude_bits < kSmallestGroupBits ? 0.0f : largest / kMomentumCodesSquared;
}

/// 1/s for encoding, or 0 for groups that have only zero codes.
inline float group_inverse(float step) { return step > 0 ? 1.0f / step : 0.0f; }

/// The largest whole c with c^2 <= y in f32. The root is only a first guess, good to 1, so that an
/// instruction set may guess by other means and still give the same code.
inline float floor_root(float y) {
  float c = std::floor(std::sqrt(y));
  if (c * c > y) return c - 1.0f;
  return (c + 1.0f) * (c + 1.0f) <= y ? c + 1.0f : c;
}

/// The largest whole c with (c^2)^2 <= y in f32.
inline float floor_fourth_root(float y) {
  const auto fourth = [](float c) { return (c * c) * (c * c); };
  float c = std::floor(std::sqrt(std::sqrt(y)));
  if (fourth(c) > y) return c - 1.0f;
  return fourth(c + 1.0f) <= y ? c + 1.0f : c;
}

/// The smaller of the two codes around |value|, or the larger with the probability that makes the
/// decoded value right on average. `inverse` is not 0.
inline int8_t encode_momentum(float value, float inverse, uint32_t random16) {
  float y = std::fabs(value) * inverse;
  if (y > kMomentumCodesSquared) y = kMomentumCodesSquared;
  const float lower = floor_root(y);
  const float gap = 2.0f * lower + 1.0f;  // (c + 1)^2 - c^2
  const bool up = unit_interval(random16) * gap < y - lower * lower;
  const auto code = static_cast<int32_t>(up ? lower + 1.0f : lower);
  return static_cast<int8_t>(std::signbit(value) ? -code : code);
}

inline float decode_momentum(int8_t code, float step) {
  const auto c = static_cast<float>(code);
  return (c * std::fabs(c)) * step;
}

/// As above, right on average for the variance itself (not for its root): it is the variance that
/// is averaged over steps. Only zero gets code 0: a variance lost while its momentum is not would
/// make the next weight jump.
inline uint8_t encode_variance(float value, float inverse, uint32_t random16) {
  float y = (std::fabs(value) * inverse) * inverse;
  if (y > kVarianceCodesFourth) y = kVarianceCodesFourth;
  const float lower = floor_fourth_root(y);
  const float square = lower * lower;
  const float side = 2.0f * lower + 1.0f;
  const float gap = side * (2.0f * square + side);  // (c + 1)^4 - c^4
  const bool up = unit_interval(random16) * gap < y - square * square;
  const float code = up ? lower + 1.0f : lower;
  return static_cast<uint8_t>(code == 0 && value != 0 ? 1.0f : code);
}

inline float decode_variance(uint8_t code, float step) {
  const auto c = static_cast<float>(code);
  const float root = (c * c) * step;
  return root * root;
}

}  // namespace smartinf::kernels
