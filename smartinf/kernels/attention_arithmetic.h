// The arithmetic of attention over cache blocks, one number at a time: the plain truth that every
// instruction set is compared with, and that OpenCL kernels are made of. In the language of
// smartinf/base/arithmetic.h. What is fused, and the order of additions, is in docs/numerics.md.
#pragma once

#if !defined(__OPENCL_C_VERSION__)
#include <cmath>

#include "smartinf/kernels/arithmetic.h"
namespace smartinf {
namespace kernels {
#endif

SI_CONSTANT(uint32_t, kMinusInfinityBits) = 0xff800000u;

/// sum + a * b, rounded once. Half the instructions of a product and a sum, and the same bits
/// wherever there are any for it; processors without them are slow.
SI_FUNCTION SI_F32 fused(SI_F32 a, SI_F32 b, SI_F32 sum) {
#if defined(__OPENCL_C_VERSION__)
  return fma(a, b, sum);
#else
  return std::fma(a, b, sum);
#endif
}

// exp(x) = 2^n exp(r) with n the integer nearest to x / ln 2. ln 2 is subtracted in two parts, the
// first of 9 bits, so that its product with n is exact.
SI_CONSTANT(uint32_t, kExpRoundBits) = 0x4b400000u;  // of kExpRound
SI_CONSTANT(SI_F32, kExpRound) = 12582912.0f;        // 1.5 * 2^23: adding it rounds to integers
SI_CONSTANT(SI_F32, kExpLeast) = -87.0f;             // exp of less is 0, never a denormal
SI_CONSTANT(SI_F32, kLog2OfE) = 1.44269504f;
SI_CONSTANT(SI_F32, kLn2Upper) = 0.693359375f;
SI_CONSTANT(SI_F32, kLn2Lower) = -2.12194440e-4f;
// Source: expf of Cephes (Moshier 1992): exp(r) = 1 + r + r^2 (e0 + e1 r + ... + e5 r^5).
SI_CONSTANT(SI_F32, kExp0) = 5.0000001201e-1f;
SI_CONSTANT(SI_F32, kExp1) = 1.6666665459e-1f;
SI_CONSTANT(SI_F32, kExp2) = 4.1665795894e-2f;
SI_CONSTANT(SI_F32, kExp3) = 8.3334519073e-3f;
SI_CONSTANT(SI_F32, kExp4) = 1.3981999507e-3f;
SI_CONSTANT(SI_F32, kExp5) = 1.9875691500e-4f;

/// exp of x <= 0, within 1.1 ulp; of NaN, NaN.
SI_FUNCTION SI_F32 exp_of_negative(SI_F32 x) {
  if (x < kExpLeast) return 0.0f;
  const SI_F32 shifted = x * kLog2OfE + kExpRound;
  const SI_F32 n = shifted - kExpRound;
  const SI_F32 r = (x - n * kLn2Upper) - n * kLn2Lower;
  SI_F32 sum = kExp5 * r + kExp4;
  sum = sum * r + kExp3;
  sum = sum * r + kExp2;
  sum = sum * r + kExp1;
  sum = sum * r + kExp0;
  sum = ((sum * (r * r)) + r) + 1.0f;
  return sum * SI_FLOAT_OF((SI_UINT_OF(shifted) - kExpRoundBits + 127u) << 23);
}

/// cap * tanh(x / cap), by tanh |y| = (1 - e) / (1 + e) with e = exp(-2 |y|).
SI_FUNCTION SI_F32 soft_capped(SI_F32 x, SI_F32 cap, SI_F32 inverse) {
  const SI_F32 y = x * inverse;
  const uint32_t sign = SI_UINT_OF(y) & kSignBit;
  const SI_F32 e = exp_of_negative(SI_FLOAT_OF(SI_UINT_OF(y) | kSignBit) * 2.0f);
  const SI_F32 capped = ((1.0f - e) / (1.0f + e)) * cap;
  return SI_FLOAT_OF(SI_UINT_OF(capped) | sign);
}

/// What a score contributes to a maximum, which is never NaN.
SI_FUNCTION SI_F32 score_or_least(SI_F32 score) {
  return score != score ? SI_FLOAT_OF(kMinusInfinityBits) : score;
}
SI_FUNCTION SI_F32 greater(SI_F32 a, SI_F32 b) { return a < b ? b : a; }
/// Makes -0 to 0, so that the order in which a maximum was found does not show.
SI_FUNCTION SI_F32 without_sign_of_zero(SI_F32 max) { return max + 0.0f; }
/// What scores have subtracted: 0 while all are -infinity, whose exp is then 0.
SI_FUNCTION SI_F32 score_base(SI_F32 max) {
  return SI_UINT_OF(max) == kMinusInfinityBits ? 0.0f : max;
}

// q8 rows: codes from -127 to 127, nearest, ties to even, times the row's scale. A row with an
// infinity or NaN becomes NaN as a whole; one below kSmallestGroupBits becomes zeros.

/// magnitude_bits: the largest of the row.
SI_FUNCTION SI_F32 row_scale(uint32_t magnitude_bits) {
  if (magnitude_bits >= kInfinityBits) return SI_FLOAT_OF(kCanonicalNan);
  return magnitude_bits < kSmallestGroupBits ? 0.0f : SI_FLOAT_OF(magnitude_bits) / 127.0f;
}
/// inverse: group_inverse() of the scale.
SI_FUNCTION int row_code(SI_F32 value, SI_F32 inverse) {
  if (!(inverse > 0)) return 0;
  return (int)(SI_UINT_OF(value * inverse + kExpRound) - kExpRoundBits);
}

#if !defined(__OPENCL_C_VERSION__)
}  // namespace kernels
}  // namespace smartinf
#endif
