// What each instruction set implements of error feedback. The public side is feedback.h.
#pragma once

#include <cstddef>

#include "smartinf/base/float_formats.h"

namespace smartinf::kernels {

/// Elements that share one mean square, and the lanes its squares are added up in: lane l adds
/// elements l, l + 32, ... in order; lanes are then added in halves (16 + 16, ..., 1 + 1).
inline constexpr size_t kMeanSquareElements = 256;
inline constexpr size_t kMeanSquareLanes = 32;

/// Of `count` elements, from the sums by lane; uses them up. by_lane: [kMeanSquareLanes].
inline float mean_square(float* by_lane, size_t count) {
  for (size_t half = kMeanSquareLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) by_lane[l] += by_lane[l + half];
  }
  return by_lane[0] / static_cast<float>(count);
}

struct FeedbackKernels {
  /// As kernels::add_feedback(). residual or squares may be null.
  void (*add)(const base::Bf16* gradient, const base::Bf16* residual, float scale, float decay,
              float* out, float* squares, size_t n);
  /// weights -= residual * rate, which is held within [-limit, limit].
  void (*ahead)(const base::Bf16* residual, float rate, float limit, float* weights, size_t n);
};

const FeedbackKernels& scalar_feedback();

}  // namespace smartinf::kernels
