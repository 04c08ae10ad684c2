// bf16 and f16 as storage types, with the one conversion every room agrees on: round to nearest,
// ties to even. The scalar truth; the vector casts in kernels/ give the same bits.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string_view>

#include "smartinf/base/enum_names.h"

namespace smartinf::base {

/// Element types that cross the host link or leave the device.
enum class DataType : uint8_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

constexpr uint64_t data_type_bytes(DataType type) { return type == DataType::kF32 ? 4 : 2; }

inline constexpr std::array<std::string_view, 3> kDataTypeNames{"f32", "bf16", "f16"};
constexpr EnumNames enum_names(DataType) { return kDataTypeNames; }
constexpr std::string_view data_type_name(DataType type) { return enum_name(type); }

struct Bf16 {
  uint16_t bits = 0;
};
struct F16 {
  uint16_t bits = 0;
};

/// NaN stays NaN (made quiet, payload's upper bits kept).
constexpr Bf16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return Bf16{static_cast<uint16_t>((bits >> 16) | 0x0040u)};
  }
  return Bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

constexpr float to_f32(Bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

/// IEEE binary16 with denormals; beyond 65504 after rounding becomes infinity.
constexpr F16 to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN: quiet, upper payload bits kept
    return F16{static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x03ffu))};
  }
  if (magnitude >= 0x477ff000u) return F16{static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x33000001u) return F16{static_cast<uint16_t>(sign)};  // rounds to zero
  if (magnitude < 0x38800000u) {                                         // denormal result
    const uint32_t exponent = magnitude >> 23;
    const uint32_t mantissa = (magnitude & 0x007fffffu) | 0x00800000u;
    const uint32_t shift = 126u - exponent;
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1u);
    const uint32_t up = (rest > half || (rest == half && (kept & 1u))) ? 1u : 0u;
    return F16{static_cast<uint16_t>(sign | (kept + up))};
  }
  const uint32_t rebiased = magnitude - 0x38000000u;
  const uint32_t rounded = rebiased + 0x0fffu + ((rebiased >> 13) & 1u);
  return F16{static_cast<uint16_t>(sign | (rounded >> 13))};
}

constexpr float to_f32(F16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  uint32_t mantissa = value.bits & 0x03ffu;
  if (exponent == 0x1fu) {
    // A signalling NaN is made quiet, as the hardware conversions do.
    const uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {
    if (mantissa == 0) return std::bit_cast<float>(sign);
    uint32_t shift = 0;
    while ((mantissa & 0x0400u) == 0) {
      mantissa <<= 1;
      ++shift;
    }
    return std::bit_cast<float>(sign | ((113u - shift) << 23) | ((mantissa & 0x03ffu) << 13));
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

}  // namespace smartinf::base
