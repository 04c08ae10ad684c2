// How a subgroup's optimizer state is cut into planes and encoded. Kernels and storage share these
// facts and nothing else, so they live below both.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <span>
#include <string>
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

/// How one plane is stored. A q8 or q4 block holds all its codes, then one f32 scale per 256
/// elements; an m24 block the upper halves of its f32s, then the byte below each: the last byte is
/// not kept.
enum class Encoding : uint8_t { kF32 = 0, kBf16 = 1, kQ8 = 2, kM24 = 3, kQ4 = 4 };

inline constexpr std::array<std::string_view, 5> kEncodingNames{"f32", "bf16", "q8", "m24", "q4"};
constexpr EnumNames enum_names(Encoding) { return kEncodingNames; }
constexpr std::string_view encoding_name(Encoding encoding) { return enum_name(encoding); }

/// Elements that share one scale in a q8 or q4 plane.
inline constexpr uint64_t kCodeGroupElements = 256;

/// Bytes of the codes of a q8 or q4 block of `count` elements, padded to 4 so that the scales
/// behind them are aligned.
uint64_t code_bytes(Encoding encoding, uint64_t count);

/// Bytes of `count` elements that start on a block boundary. A short last group of q8 or q4 still
/// has a scale.
uint64_t encoded_bytes(Encoding encoding, uint64_t count);

/// How momentum and variance are kept.
enum class MomentFormat : uint8_t { kF32 = 0, kBf16 = 1, kQ8 = 2, kQ4 = 3 };

inline constexpr std::array<std::string_view, 4> kMomentFormatNames{"f32", "bf16", "q8", "q4"};
constexpr EnumNames enum_names(MomentFormat) { return kMomentFormatNames; }

/// How master weights are kept.
enum class MasterFormat : uint8_t { kF32 = 0, kM24 = 1, kBf16 = 2 };

inline constexpr std::array<std::string_view, 3> kMasterFormatNames{"f32", "m24", "bf16"};
constexpr EnumNames enum_names(MasterFormat) { return kMasterFormatNames; }

/// The user's choice: how a state is kept. Any master weights go with any moments; residuals are
/// always bf16.
struct StateFormat {
  MomentFormat moments = MomentFormat::kF32;
  MasterFormat master = MasterFormat::kF32;

  constexpr auto operator<=>(const StateFormat&) const = default;

  static const StateFormat kF32;  // these beside f32 master weights
  static const StateFormat kBf16;
  static const StateFormat kQ8;
};
inline constexpr StateFormat StateFormat::kF32{MomentFormat::kF32};
inline constexpr StateFormat StateFormat::kBf16{MomentFormat::kBf16};
inline constexpr StateFormat StateFormat::kQ8{MomentFormat::kQ8};

/// Every pair, those with f32 master weights first.
std::span<const StateFormat> all_state_formats();

/// The name of the moments alone beside f32 master weights, else of both: "q8", "m24+q8".
std::string state_format_name(StateFormat format);

/// The encoding that `format` gives to `kind`.
Encoding plane_encoding(StateFormat format, PlaneKind kind);

}  // namespace smartinf::base
