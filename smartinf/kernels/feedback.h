// Error feedback for compressed gradients: what earlier steps did not send, the residual, is added
// to the step's gradient.
#pragma once

#include <cstdint>
#include <span>

#include "smartinf/kernels/update.h"

namespace smartinf::kernels {

/// out = scale * gradient + residual, product and sum rounded to f32.
/// Shapes: gradient, out: [n]; residual: [n] or empty (then as if 0). Threads: safe on
/// disjoint outputs. Errors: none at run time; spans of other lengths are bugs (SI_CHECK).
/// Source: error feedback as in Karimireddy et al. 2019.
void add_feedback(const KernelTable& table, std::span<const base::Bf16> gradient,
                  std::span<const base::Bf16> residual, float scale, std::span<float> out);

/// Input of error feedback for a block of a step: gradient and residual are added up.
struct FeedbackBlock {
  std::span<const base::Bf16> gradient;  // [n]
  std::span<const base::Bf16> residual;  // [n]
  float scale = 1;
  uint64_t element = 0;  // the first one's place in the parameter space; on a rounding group
  uint64_t step = 0;  // the new residual is rounded stochastically, as a function of these three,
  uint64_t seed = 0;  // with the bits of KernelTable::encode_block() for a momentum in bf16
  size_t next = 0;    // elements behind it, of both, that will be read next; only for time
};

/// The sum of squares of `in`, the same on all instruction sets, and where out is not null a copy.
/// Squares are those of f32: a number below 1e-23 adds nothing.
/// Shapes: in, out: [n]. Threads: safe on disjoint outputs.
double copy_squares(const KernelTable& table, std::span<const base::Bf16> in, base::Bf16* out);

/// Adds the squares of scale * in by row and by column, all in f32 and in a fixed order, the same
/// on all instruction sets. A square beyond f32 makes its sums infinite.
/// Shapes: in: [row_sums, column_sums] row by row. Threads: safe on disjoint outputs.
/// Source: Shazeer and Stern 2018 (Adafactor), section 3; docs/smartcomp.md has the use.
void add_matrix_squares(const KernelTable& table, std::span<const base::Bf16> in, float scale,
                        std::span<float> row_sums, std::span<float> column_sums);

/// Which of the rule's planes is its variance. For rules that keep one (SI_CHECK).
size_t variance_plane(UpdateRule rule);

/// How far a group's weights step ahead: as an update of its rule would have moved them by the
/// residual.
struct StepAhead {
  float lr = 0;    // 0: nothing changes
  float bias = 1;  // of the variance: 1 - beta2^t
  float eps = 0;
};
/// For adam and adamw. `step` is the updater's, as for make_step_scalars().
StepAhead make_step_ahead(const RuleOptions& options, const GroupOptions& group,
                          base::StepNumber step);

/// In steps of lr; for elements whose variance has decayed while they waited.
inline constexpr float kStepAheadMost = 4;
/// Moves weights to where they would be if the residual had arrived as well:
/// weights -= min(max(lr * residual / (root * roots / sqrt(bias) + eps), -most), most) with
/// most = |lr| * kStepAheadMost, in f32, the result rounded to their type.
/// Shapes: weights: [n] of type, of one row of a matrix; residual: [n]; root times roots [n]: the
/// square roots of the variances. Threads: safe on disjoint weights.
/// Source: Xu, Huo and Huang 2021, step-ahead error feedback; docs/smartcomp.md.
void step_ahead(const KernelTable& table, const StepAhead& how,
                std::span<const base::Bf16> residual, float root, std::span<const float> roots,
                void* weights, base::DataType type);

}  // namespace smartinf::kernels
