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

}  // namespace smartinf::kernels
