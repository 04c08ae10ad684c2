// Kernels of error feedback, one set for each instruction set. The public side is feedback.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/state_format.h"

namespace smartinf::kernels {

/// Elements whose squares are added up in f32, and the lanes they are added up in: lane l adds
/// elements l, l + 32, ... in order; lanes are then added in halves (16 + 16, ..., 1 + 1).
inline constexpr size_t kSquaresGroup = 256;
inline constexpr size_t kSquaresLanes = 32;
/// The same of a matrix's row, whatever its length.
inline constexpr size_t kRowLanes = 16;

/// The sum of the sums by lane; uses them up.
template <size_t kLanes>
float sum_of_lanes(std::array<float, kLanes>& by_lane) {
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) by_lane[l] += by_lane[l + half];
  }
  return by_lane[0];
}
/// A sum of n squares, or where it is outside of the range of f32, the same in f64. in: [n].
double sum_in_range(float sum, const base::Bf16* in, size_t n);
inline constexpr float kSquaresLeast = 1e-28f;

// The new residual is rounded by such groups too.
static_assert(kSquaresGroup == base::kCodeGroupElements);

/// Input of ahead(), n elements.
struct StepAheadPass {
  const base::Bf16* residual = nullptr;
  float lr = 0;
  float limit = 0;  // of a step
  float root = 0;
  const float* roots = nullptr;
  float eps = 0;
};
/// Where root and eps are both 0: then the residual is 0 too, and the step shall be.
inline constexpr float kRootLeast = std::numeric_limits<float>::min();

struct FeedbackKernels {
  /// As kernels::add_feedback(). residual may be null.
  void (*add)(const base::Bf16* gradient, const base::Bf16* residual, float scale, float* out,
              size_t n);
  /// Copies; returns the sum of squares: in f32 for each kSquaresGroup, by lanes as above, or
  /// in f64 (sum_in_range); of those sums in f64. out may be null.
  double (*copy_squares)(const base::Bf16* in, base::Bf16* out, size_t n);
  /// As kernels::add_matrix_squares().
  void (*add_matrix_squares)(const base::Bf16* in, size_t rows, size_t columns, float scale,
                             float* row_sums, float* column_sums);
  /// As kernels::step_ahead(), of f32; root has the bias in it.
  void (*ahead)(const StepAheadPass& pass, float* weights, size_t n);
};

const FeedbackKernels& scalar_feedback();

}  // namespace smartinf::kernels
