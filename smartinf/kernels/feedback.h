// Error feedback for compressed gradients: the step's gradient meets what earlier steps did not
// send.
#pragma once

#include <span>

#include "smartinf/kernels/update.h"

namespace smartinf::kernels {

/// out = scale * gradient + decay * residual, each product and the sum rounded to f32.
/// squares: the mean of (scale * gradient)^2 over each kMeanSquareElements neighbours, the last
/// over what is left; summed in a fixed order, so that all instruction sets give the same bits.
/// Shapes: gradient, out: [n]; residual: [n] or empty (then as if 0 and decay 0);
/// squares: [divide_up(n, kMeanSquareElements)] or empty (not wanted). Threads: safe on disjoint
/// outputs. Errors: none at run time; spans of other lengths are bugs (SI_CHECK).
/// Source: error feedback as in Karimireddy et al. 2019; docs/smartcomp.md has the use of squares.
void add_feedback(const KernelTable& table, std::span<const base::Bf16> gradient,
                  std::span<const base::Bf16> residual, float scale, float decay,
                  std::span<float> out, std::span<float> squares);

/// Elements of a group whose variances stand for all 256 of it.
inline constexpr size_t kVarianceSamples = 16;

/// One variance for each kMeanSquareElements neighbours: the mean of the first kVarianceSamples.
/// With mean squares in the gradients' place they are all equal; without, they were so long ago
/// that only an estimate is wanted. Shapes: variances: [n]; out: [divide_up(n,
/// kMeanSquareElements)]. Threads: pure.
void group_variances(std::span<const float> variances, std::span<float> out);

/// Which of the rule's planes is its variance. For rules that keep one (SI_CHECK).
size_t variance_plane(UpdateRule rule);

/// How far a group's weights step ahead: what an update of its rule made of what is kept.
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
/// Takes weights to where they would be had what is kept arrived as well:
/// weights -= lr * min(max(residual / (sqrt(v / bias) + eps), -kStepAheadMost), kStepAheadMost),
/// in f32, the result rounded to their type.
/// Shapes: weights: [n] of type; residual: [n]; v: [n] by its group of kMeanSquareElements, of
/// which the first begins `phase` elements before weights[0]. Threads: safe on disjoint weights.
/// Source: Xu, Huo and Huang 2021, step-ahead error feedback; docs/smartcomp.md.
void step_ahead(const KernelTable& table, const StepAhead& how,
                std::span<const base::Bf16> residual, std::span<const float> variances,
                size_t phase, void* weights, base::DataType type);

}  // namespace smartinf::kernels
