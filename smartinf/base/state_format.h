// How a subgroup's optimizer state is cut into planes and encoded. Kernels and storage share these
// facts and nothing else, so they live below both.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "smartinf/base/enum_names.h"

namespace smartinf::base {

/// Elements of one checksummed block of a plane. A block of every encoding is at most 256 KiB, so a
/// block of each plane of a subgroup, its gradient and its new weights fit in a core's L2 together:
/// verify, update and seal touch memory once. Subgroups are multiples of it, but for the last.
inline constexpr uint64_t kBlockElements = uint64_t{1} << 16;

/// Extents and direct transfers are aligned to this.
inline constexpr uint64_t kIoAlignment = 4096;

/// One array of a state. The order is the order on the drive.
enum class PlaneKind : uint8_t { kMaster = 0, kMomentum = 1, kVariance = 2, kResidual = 3 };

inline constexpr std::array<std::string_view, 4> kPlaneKindNames{"master", "momentum", "variance",
                                                                 "residual"};
constexpr EnumNames enum_names(PlaneKind) { return kPlaneKindNames; }
constexpr std::string_view plane_kind_name(PlaneKind kind) { return enum_name(kind); }

/// How one plane is stored. A q8 block holds all its codes, then one f32 scale per 256 elements.
enum class Encoding : uint8_t { kF32 = 0, kBf16 = 1, kQ8 = 2 };

inline constexpr std::array<std::string_view, 3> kEncodingNames{"f32", "bf16", "q8"};
constexpr EnumNames enum_names(Encoding) { return kEncodingNames; }
constexpr std::string_view encoding_name(Encoding encoding) { return enum_name(encoding); }

/// Elements that share one scale in a q8 plane.
inline constexpr uint64_t kQ8GroupElements = 256;

/// Bytes of `count` elements that start on a block boundary. A q8 plane's short last group still
/// has a scale; code bytes of each block are padded to 4 so that its scales are aligned.
uint64_t encoded_bytes(Encoding encoding, uint64_t count);

/// The user's choice: how momentum and variance are kept. Master weights are always f32, residuals
/// bf16.
enum class StateFormat : uint8_t { kF32 = 0, kBf16 = 1, kQ8 = 2 };

inline constexpr std::array<std::string_view, 3> kStateFormatNames{"f32", "bf16", "q8"};
constexpr EnumNames enum_names(StateFormat) { return kStateFormatNames; }
constexpr std::string_view state_format_name(StateFormat format) { return enum_name(format); }
constexpr std::optional<StateFormat> state_format_from_name(std::string_view name) {
  return enum_from_name<StateFormat>(name);
}

/// The encoding that `format` gives to `kind`.
Encoding plane_encoding(StateFormat format, PlaneKind kind);

}  // namespace smartinf::base
