// What each instruction set implements of error feedback. The public side is feedback.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/state_format.h"

namespace smartinf::kernels {

/// Elements that share one mean square, and the lanes its squares are added up in: lane l adds
/// elements l, l + 32, ... in order; lanes are then added in halves (16 + 16, ..., 1 + 1).
inline constexpr size_t kMeanSquareElements = 256;
inline constexpr size_t kMeanSquareLanes = 32;

/// The sum of the sums by lane; uses them up. by_lane: [kMeanSquareLanes].
inline float sum_of_lanes(float* by_lane) {
  for (size_t half = kMeanSquareLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) by_lane[l] += by_lane[l + half];
  }
  return by_lane[0];
}
inline float mean_square(float* by_lane, size_t count) {
  return sum_of_lanes(by_lane) / static_cast<float>(count);
}
/// A sum of n squares, or where it is beyond what f32 can tell, the same in f64. in: [n].
double sum_in_range(float sum, const base::Bf16* in, size_t n);
inline constexpr float kSquaresLeast = 1e-28f;

// What is kept is rounded by the groups whose mean squares are found.
static_assert(kMeanSquareElements == base::kQ8GroupElements);

/// What keep() reads and makes of n elements: arrays as in kernels::keep_unsent(), none of them
/// null but squares. element: a multiple of kMeanSquareElements.
struct FeedbackPass {
  const base::Bf16* gradient = nullptr;
  const base::Bf16* residual = nullptr;
  float scale = 1;
  float decay = 1;
  uint64_t element = 0;        // the first one's place in the parameter space
  uint64_t rounding_seed = 0;  // as in state_codec.h
  base::Bf16* kept = nullptr;
  float* squares = nullptr;  // or null
  int32_t lowest = 0;        // magnitude of the smallest candidate
  size_t room = 0;           // for candidates
  size_t likely = 0;         // candidates; only time depends on it
  uint32_t* indices = nullptr;
  float* values = nullptr;
};

struct FeedbackKernels {
  /// As kernels::add_feedback(). residual or squares may be null.
  void (*add)(const base::Bf16* gradient, const base::Bf16* residual, float scale, float decay,
              float* out, float* squares, size_t n);
  /// As kernels::keep_unsent(), but for choosing among the candidates: returns how many there are,
  /// or `room` when there may be no room for all: then what was written means nothing.
  size_t (*keep)(const FeedbackPass& pass, size_t n);
  /// Copies; returns the sum of squares: in f32 for each kMeanSquareElements, by lanes as above, or
  /// in f64 (sum_in_range); of those sums in f64. out may be null.
  double (*copy_squares)(const base::Bf16* in, base::Bf16* out, size_t n);
  /// weights -= residual * rate, which is held within [-limit, limit].
  void (*ahead)(const base::Bf16* residual, float rate, float limit, float* weights, size_t n);
};

const FeedbackKernels& scalar_feedback();

}  // namespace smartinf::kernels
