// Kernels of the stages of an update over one tile, one set for each instruction set. A tile is at
// most 256 elements, small enough that everything between two stages stays in the first-level
// cache. The order of the stages, blocks and groups is written once, in update.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/state_format.h"
#include "smartinf/kernels/attention_kernels.h"
#include "smartinf/kernels/feedback_kernels.h"
#include "smartinf/kernels/row_product_kernels.h"
#include "smartinf/kernels/selection_kernels.h"
#include "smartinf/kernels/signs_kernels.h"
#include "smartinf/kernels/state_codec.h"
#include "smartinf/kernels/update_rule.h"

namespace smartinf::kernels {

/// A tile is a group of q8 and of q4.
inline constexpr size_t kTileElements = base::kCodeGroupElements;

/// Elements of one leaf of the norm's tree, and the lanes its squares are added up in.
inline constexpr size_t kNormLeafElements = 4096;
inline constexpr size_t kNormLanes = 16;

/// Whole tiles of a block in a row that share scalars, each pointer at the first one's share.
struct WholeTiles {
  size_t count = 0;  // tiles
  const void* gradient = nullptr;
  base::DataType gradient_type = base::DataType::kF32;
  void* weights = nullptr;  // or null
  base::DataType weights_type = base::DataType::kF32;
  base::MasterFormat master_format = base::MasterFormat::kF32;
  std::byte* master = nullptr;    // m24: the upper halves
  uint8_t* master_low = nullptr;  // m24: the bytes below them
  std::byte* momentum = nullptr;  // null when the rule does not keep it
  std::byte* variance = nullptr;
  float* momentum_steps = nullptr;  // q8 and q4: one step a tile
  float* variance_steps = nullptr;
  const float* squares = nullptr;  // one for each element, or null
  uint64_t element = 0;            // of the first tile in the parameter space
};

/// Any n for casts; at most kTileElements (kNormLeafElements for squares) otherwise. Pointers are
/// aligned to their element, no more.
struct TileKernels {
  std::string_view isa;

  void (*widen)(const void* in, base::DataType type, float* out, size_t n);
  void (*narrow)(const float* in, void* out, base::DataType type, size_t n);

  /// One step in place. momentum or variance is null when the rule does not keep it. squares: [n]
  /// in place of the gradient's, or null.
  void (*update)(const StepScalars& scalars, const float* gradient, float* master, float* momentum,
                 float* variance, size_t n, const float* squares);

  /// All stages at once, values staying in registers from read to write: the way of nearly all
  /// elements. Null: there is none, and the stages do it one by one. Same bits either way.
  void (*update_whole_tiles)(base::MomentFormat moments, const StepScalars& scalars,
                             const WholeTiles& tiles);

  void (*encode_bf16)(const Progression& numbers, const float* in, uint16_t* out, size_t n);
  void (*encode_m24)(const Progression& numbers, const float* in, uint16_t* upper, uint8_t* lower,
                     size_t n);
  void (*decode_m24)(const uint16_t* upper, const uint8_t* lower, float* out, size_t n);
  /// bits: 8 for q8, 4 for q4. Returns the group's step.
  float (*encode_codes)(int bits, base::PlaneKind kind, const Progression& numbers, const float* in,
                        uint8_t* out, size_t n);
  void (*decode_codes)(int bits, base::PlaneKind kind, float step, const uint8_t* in, float* out,
                       size_t n);

  /// out[i] = in[i] * by.
  void (*multiply)(const float* in, float by, float* out, size_t n);

  /// Sum of squares of a leaf: lane l adds elements l, l + 16, l + 32, ... in order; lanes are then
  /// added in halves (8 + 8, 4 + 4, 2 + 2, 1 + 1).
  double (*leaf_squares)(const void* in, base::DataType type, size_t n);

  SelectionKernels selection;
  FeedbackKernels feedback;
  SignKernels signs;
  AttentionKernels attention;
  RowProductKernels row_product;
};

/// The plain truth; every machine has it.
const TileKernels& scalar_tiles();

}  // namespace smartinf::kernels
