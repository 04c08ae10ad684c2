// A layer whose matrices are rounded to integers of 4 bits, some up and some down as training has
// it. Source: Cheng et al. 2024, SignRound (2309.05516), of AutoRound; offsets here are trained by
// AdamW.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/types.h>

#include "smartinf/base/status.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/train/distill/layered_model.h"

namespace smartinf::train {

/// A group of neighbouring weights of a row shares a scale: a weight w becomes code * scale with
/// code = round(w / scale + offset) in [-8, 7], where scale = (1 - cut) * largest / -8 and largest
/// is the group's weight of the largest magnitude. Offsets, in [-0.5, 0.5] each, and cuts, in [0,
/// 1] of each group, are trained; where they are 0, weights are rounded to nearest. Scales have the
/// type of the model's files. Threads: one caller. Errors: torch throws.
class Rounding {
 public:
  /// Of a layer's matrices, but not of a router. Errors: kUnsupported for layers with experts and
  /// matrices of [in, out]; kInvalidArgument where groups do not divide rows.
  static base::Result<Rounding> of(const LayeredModel& model, uint32_t layer, uint32_t group);

  struct Matrix {
    std::string name;
    uint64_t first = 0;  // element of the layer
    int64_t rows = 0;    // of `columns` weights
    int64_t columns = 0;
    int64_t offsets = 0;  // element of what is trained
    int64_t cuts = 0;
  };
  const std::vector<Matrix>& matrices() const { return matrices_; }
  /// What is trained: of each matrix its offsets [rows, columns], then its cuts [rows, groups].
  const plan::ParameterSpace& space() const { return space_; }

  struct Codes {
    torch::Tensor code_RC;   // int8
    torch::Tensor scale_RG;  // f32 values that the files' type has
  };
  /// trained: [space().count()] f32.
  Codes codes(const Matrix& matrix, const torch::Tensor& trained) const;
  /// Fills in the layer's weights, [N] of any type, those of its other tensors as they are.
  void put_weights(const torch::Tensor& trained, torch::Tensor& weights_N) const;

  struct Gradient {
    torch::Tensor offsets_RC;
    torch::Tensor cuts_RG;
  };
  /// Of a loss whose gradient by the rounded matrix is this one, as if rounding had the slope 1.
  Gradient gradient(const Matrix& matrix, const torch::Tensor& trained,
                    const torch::Tensor& by_weight_RC) const;

 private:
  struct Parts;
  Parts parts(const Matrix& matrix, const torch::Tensor& trained) const;

  int64_t group_ = 0;
  base::DataType scale_type_ = base::DataType::kF32;
  torch::Tensor exact_N_;  // the layer's weights before
  std::vector<Matrix> matrices_;
  plan::ParameterSpace space_;
};

/// Codes as compressed-tensors' format pack-quantized has them: eight to a word, the first in the
/// lowest bits, each plus 8. [R, C] -> [R, C / 8] int32.
torch::Tensor packed_words(const torch::Tensor& code_RC);

}  // namespace smartinf::train
