// How momentum and variance become bf16 or 8-bit codes and come back, one element at a time: the
// plain truth of the codecs. Every rounding is stochastic, its random bits a function of (seed,
// step, element): repeatable, and equal on every instruction set. docs/numerics.md has the reasons.
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

/// The random numbers of one group of kQ8GroupElements elements in one step: for element `lane`
/// start + lane * stride, 15 random bits on top and a one below them, which is half of what they
/// leave out. With random start and stride such numbers are uniform, and those of two elements
/// are as good as independent (Dietzfelbinger 1996: exactly so but for strides' even multiples,
/// which at 128 lanes apart still take 256 values evenly); a vector of the next ones costs one
/// addition. Groups are aligned in the parameter space: the numbers do not depend on subgroups,
/// devices or threads.
struct Progression {
  uint32_t start = 0;
  uint32_t stride = 0;
};
struct RoundingKey {
  Progression momentum;
  Progression variance;
};

inline constexpr int kRandomBits = 15;

/// The seed that the groups of a step share. Threads: pure.
inline uint64_t rounding_seed(uint64_t seed, uint64_t step) { return base::mix_seed(seed, step); }

/// Threads: pure. `element` is the group's first, a multiple of kQ8GroupElements.
inline RoundingKey rounding_key(uint64_t step_seed, uint64_t element) {
  const uint64_t word = base::mix_seed(step_seed, element / base::kQ8GroupElements);
  const auto top = [word](int nth) {  // the nth kRandomBits of the word, in the upper bits
    return static_cast<uint32_t>(word >> (nth * kRandomBits)) << (32 - kRandomBits);
  };
  constexpr uint32_t kHalf = 1u << (31 - kRandomBits);
  return {.momentum = {top(0) | kHalf, top(1)}, .variance = {top(2) | kHalf, top(3)}};
}

inline const Progression& progression(const RoundingKey& key, base::PlaneKind kind) {
  return kind == base::PlaneKind::kVariance ? key.variance : key.momentum;
}

inline uint32_t random_number(const RoundingKey& key, base::PlaneKind kind, size_t lane) {
  const Progression& numbers = progression(key, kind);
  return numbers.start + static_cast<uint32_t>(lane) * numbers.stride;
}

/// Truncation after adding a random number below the kept bits: up with probability equal to the
/// fraction cut off. Infinity stays, NaN becomes canonical.
inline uint16_t round_bf16(float value, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & kMagnitudeMask) > kInfinityBits) return static_cast<uint16_t>(kCanonicalNan >> 16);
  return static_cast<uint16_t>((bits + (random >> 16)) >> 16);
}

// q8. A code is the upper part of an f32 between 2 and 512: three bits of exponent, then 4 bits of
// mantissa and a sign (momentum) or 5 bits of mantissa (root of the variance). That number less 2,
// times the group's step, is what the code stands for: even spacing near zero, then spacing in
// proportion to the value, from 3.1% to 6.2% for a momentum and half that for a root. Encoding adds
// random bits below the kept ones and cuts, as for bf16, which is unbiased; there is no table and
// no root to take. The steps are such that the group's largest value has the largest code.
inline constexpr float kCodeBias = 2.0f;
inline constexpr uint32_t kCodeBiasBits = 0x40000000u;
inline constexpr int kMomentumCut = 19;  // lower bits of the f32 that a code leaves out
inline constexpr int kVarianceCut = 18;
inline constexpr uint32_t kMomentumCodes = 128;  // of each sign
inline constexpr uint32_t kVarianceCodes = 256;
inline constexpr uint32_t kSignBit = 0x80000000u;

/// What a code stands for in steps. code < kMomentumCodes or kVarianceCodes.
inline float code_value(uint32_t code, int cut) {
  return std::bit_cast<float>(kCodeBiasBits | (code << cut)) - kCodeBias;
}
inline constexpr float kMomentumTop = 494.0f;  // the largest code's value: 496 - 2
inline constexpr float kVarianceTop = 502.0f;  // 504 - 2

/// A random number below a cut. It is never within 3 of either end: a value that already is on a
/// code, but for the rounding of its product with 1/step, stays there with certainty.
inline uint32_t noise_below(uint32_t random, int cut) { return random >> (32 - cut); }

/// Groups whose largest momentum is below this become zeros: 1/step must stay finite.
inline constexpr uint32_t kSmallestGroupBits = 0x0d800000u;  // 2^-100

/// The step stored for a group, from the largest (bits & kMagnitudeMask) of its momenta or of its
/// variances' roots. A group with an infinity or NaN becomes all NaN: broken numbers must not
/// vanish.
inline float group_step(base::PlaneKind kind, uint32_t magnitude_bits) {
  if (magnitude_bits >= kInfinityBits) return std::bit_cast<float>(kCanonicalNan);
  const float largest = std::bit_cast<float>(magnitude_bits);
  if (kind == base::PlaneKind::kVariance) return largest / kVarianceTop;
  return magnitude_bits < kSmallestGroupBits ? 0.0f : largest / kMomentumTop;
}

/// 1/step for encoding, or 0 for groups that have only zero codes.
inline float group_inverse(float step) { return step > 0 ? 1.0f / step : 0.0f; }

/// One of the two codes around the value, right on average; sign and magnitude. `inverse` is not 0.
inline uint8_t encode_momentum(float value, float inverse, uint32_t random) {
  const float steps = value * inverse;
  const uint32_t bits = std::bit_cast<uint32_t>(steps + std::copysign(kCodeBias, steps)) +
                        noise_below(random, kMomentumCut);
  return static_cast<uint8_t>(((bits >> kMomentumCut) & (kMomentumCodes - 1)) |
                              (bits >> 31 != 0 ? kMomentumCodes : 0));
}

inline float decode_momentum(uint8_t code, float step) {
  const float magnitude = code_value(code & (kMomentumCodes - 1), kMomentumCut) * step;
  const uint32_t sign = (code & kMomentumCodes) != 0 ? kSignBit : 0;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

/// As above for a variance's root. Only +0 gets code 0: a variance lost while its momentum is not
/// would make the next weight jump.
inline uint8_t encode_root(float root, float inverse, uint32_t random) {
  const uint32_t bits =
      std::bit_cast<uint32_t>(root * inverse + kCodeBias) + noise_below(random, kVarianceCut);
  const uint32_t code = (bits >> kVarianceCut) & (kVarianceCodes - 1);
  return static_cast<uint8_t>(code == 0 && std::bit_cast<uint32_t>(root) != 0 ? 1 : code);
}

inline float decode_variance(uint8_t code, float step) {
  const float root = code_value(code, kVarianceCut) * step;
  return root * root;
}

/// Where the code of a group's element lies: in a whole group byte j of 32-bit word w belongs to
/// element 64 j + w, so that vectors of any length pack and unpack codes by shifts alone. Short
/// groups, at the end of a plane, are in order.
inline constexpr size_t kCodeWords = base::kQ8GroupElements / 4;
inline size_t code_position(size_t lane, size_t group_elements) {
  if (group_elements < base::kQ8GroupElements) return lane;
  return lane % kCodeWords * 4 + lane / kCodeWords;
}

}  // namespace smartinf::kernels
