// Number formats and seeds in the language that C++, OpenCL C and the C++ of FPGA compilers have in
// common, so that every kind of processor computes by one text: here it is compiled, and OpenCL
// programs are made of it. It knows no references, overloads, templates or exceptions, no
// constants but SI_CONSTANT, and no functions but SI_FUNCTION and SI_CONSTANT_FUNCTION.
#pragma once

#if defined(__OPENCL_C_VERSION__)
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
#define SI_FUNCTION static inline
#define SI_CONSTANT_FUNCTION static inline
#define SI_CONSTANT(type, name) __constant const type name
#define SI_UINT_OF(value) as_uint(value)
#define SI_FLOAT_OF(bits) as_float(bits)
#define SI_SQRT(value) sqrt(value)
#define SI_F32 float
#else
#include <cmath>
#include <cstddef>
#include <cstdint>
#if __cplusplus >= 202002L
#include <bit>
#define SI_FUNCTION inline
#define SI_SQRT(value) std::sqrt(value)
#define SI_F32 float
#define SI_CONSTANT_FUNCTION constexpr
#define SI_CONSTANT(type, name) inline constexpr type name
#define SI_UINT_OF(value) std::bit_cast<uint32_t>(value)
#define SI_FLOAT_OF(bits) std::bit_cast<float>(bits)
#else  // what FPGA compilers are given
#define SI_FUNCTION static inline
#define SI_CONSTANT_FUNCTION static inline
#define SI_CONSTANT(type, name) static const type name
#if !defined(SI_F32)  // else a class in its place, with functions of these names
#define SI_F32 float
#define SI_SQRT(value) std::sqrt(value)
#define SI_UINT_OF(value) smartinf::base::uint_of(value)
#define SI_FLOAT_OF(bits) smartinf::base::float_of(bits)
namespace smartinf {
namespace base {
union FloatAndBits {
  float value;
  uint32_t bits;
};
inline uint32_t uint_of(float value) {
  FloatAndBits both;
  both.value = value;
  return both.bits;
}
inline float float_of(uint32_t bits) {
  FloatAndBits both;
  both.bits = bits;
  return both.value;
}
}  // namespace base
}  // namespace smartinf
#endif
#endif
namespace smartinf {
namespace base {
#endif

/// Mixes two words into one seed; the order matters.
/// Source: splitmix64's finaliser (Steele, Lea, Flood 2014) over a combination that is not
/// symmetric.
SI_CONSTANT_FUNCTION uint64_t mix_seed(uint64_t a, uint64_t b) {
  uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Rounded to nearest, ties to even. NaN stays NaN (made quiet, payload's upper bits kept).
SI_CONSTANT_FUNCTION uint16_t bf16_of_f32(SI_F32 value) {
  const uint32_t bits = SI_UINT_OF(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x0040u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

SI_CONSTANT_FUNCTION SI_F32 f32_of_bf16(uint16_t bf16) { return SI_FLOAT_OF((uint32_t)bf16 << 16); }

/// IEEE binary16 with denormals; beyond 65504 after rounding becomes infinity.
SI_CONSTANT_FUNCTION uint16_t f16_of_f32(SI_F32 value) {
  const uint32_t bits = SI_UINT_OF(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN: quiet, upper payload bits kept
    return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x03ffu));
  }
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (magnitude < 0x33000001u) return (uint16_t)sign;  // rounds to zero
  if (magnitude < 0x38800000u) {                       // denormal result
    const uint32_t exponent = magnitude >> 23;
    const uint32_t mantissa = (magnitude & 0x007fffffu) | 0x00800000u;
    const uint32_t shift = 126u - exponent;
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t half_way = 1u << (shift - 1u);
    const uint32_t up = (rest > half_way || (rest == half_way && (kept & 1u) != 0)) ? 1u : 0u;
    return (uint16_t)(sign | (kept + up));
  }
  const uint32_t rebiased = magnitude - 0x38000000u;
  const uint32_t rounded = rebiased + 0x0fffu + ((rebiased >> 13) & 1u);
  return (uint16_t)(sign | (rounded >> 13));
}

SI_CONSTANT_FUNCTION SI_F32 f32_of_f16(uint16_t f16) {
  const uint32_t sign = (uint32_t)(f16 & 0x8000u) << 16;
  const uint32_t exponent = (f16 >> 10) & 0x1fu;
  uint32_t mantissa = f16 & 0x03ffu;
  if (exponent == 0x1fu) {
    // A signalling NaN is made quiet, as the hardware conversions do.
    const uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
    return SI_FLOAT_OF(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {
    if (mantissa == 0) return SI_FLOAT_OF(sign);
    uint32_t shift = 0;
    while (shift < 10 && (mantissa & 0x0400u) == 0) {
      mantissa <<= 1;
      ++shift;
    }
    return SI_FLOAT_OF(sign | ((113u - shift) << 23) | ((mantissa & 0x03ffu) << 13));
  }
  return SI_FLOAT_OF(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

#if !defined(__OPENCL_C_VERSION__)
}  // namespace base
}  // namespace smartinf
#endif
