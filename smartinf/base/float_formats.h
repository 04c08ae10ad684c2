// bf16 and f16 as storage types, with the one conversion every module agrees on: round to nearest,
// ties to even. The formulas are in arithmetic.h; the vector casts in kernels/ give the same bits.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "smartinf/base/arithmetic.h"
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
constexpr Bf16 to_bf16(float value) { return Bf16{bf16_of_f32(value)}; }
constexpr float to_f32(Bf16 value) { return f32_of_bf16(value.bits); }
/// Beyond 65504 after rounding becomes infinity.
constexpr F16 to_f16(float value) { return F16{f16_of_f32(value)}; }
constexpr float to_f32(F16 value) { return f32_of_f16(value.bits); }

}  // namespace smartinf::base
