// The update formulas, one element at a time: the plain truth that every instruction set and every
// device kernel is compared with. Multiplications and additions stand in the order of torch.optim's
// single-tensor code; nothing is fused (docs/numerics.md).
#pragma once

#include <algorithm>
#include <cmath>

#include "smartinf/kernels/update_rule.h"

namespace smartinf::kernels {

/// What one element keeps between steps. A rule leaves alone what it does not keep.
struct ElementState {
  float master = 0;
  float momentum = 0;
  float variance = 0;
};

/// a + (b - a) * weight, from whichever end is nearer, as torch.lerp does: exact at both ends.
inline float lerp(float a, float b, float weight) {
  return weight < 0.5f ? a + weight * (b - a) : b + (weight - 1.0f) * (b - a);
}

/// Adam and AdamW; they differ in which of the two decays is not neutral. square: what the variance
/// takes in place of the gradient's, or null (UpdateBlock::second_moment). With it the variance is
/// at least what this gradient alone would make of 0: what it adds to the momentum moves the weight
/// no further than if the variance had been 0.
/// Source: Kingma and Ba 2015, Algorithm 1 in the order of its section 2, where step size and eps
/// carry the bias corrections; Loshchilov and Hutter 2019, Algorithm 2.
inline void update_adam(const StepScalars& s, float gradient, const float* square,
                        ElementState& e) {
  e.master = e.master * s.decay_factor;
  if (s.weight_decay != 0) gradient = gradient + s.weight_decay * e.master;
  e.momentum = lerp(e.momentum, gradient, s.one_minus_beta1);
  const float share = (s.one_minus_beta2 * gradient) * gradient;
  if (square != nullptr) {
    e.variance = std::max(e.variance * s.beta2 + s.one_minus_beta2 * *square, share);
  } else {
    e.variance = e.variance * s.beta2 + share;
  }
  e.master = e.master + (-s.step_size * e.momentum) / (std::sqrt(e.variance) + s.eps);
}

/// SGD; momentum 0 keeps the last gradient as its momentum, which changes no weight.
/// Source: torch.optim.SGD; Sutskever et al. 2013 for Nesterov's form.
inline void update_sgd(const StepScalars& s, float gradient, ElementState& e) {
  if (s.weight_decay != 0) gradient = gradient + s.weight_decay * e.master;
  if (s.first_step || s.beta1 == 0) {
    e.momentum = gradient;
  } else {
    e.momentum = e.momentum * s.beta1 + s.dampening_factor * gradient;
  }
  const float direction = s.nesterov ? gradient + s.beta1 * e.momentum : e.momentum;
  e.master = e.master + -s.lr * direction;
}

/// Source: Duchi, Hazan and Singer 2011, with torch.optim.Adagrad's options.
inline void update_adagrad(const StepScalars& s, float gradient, ElementState& e) {
  if (s.weight_decay != 0) gradient = gradient + s.weight_decay * e.master;
  const float sum = s.first_step ? s.initial_variance : e.variance;
  e.variance = sum + gradient * gradient;
  e.master = e.master + (-s.step_size * gradient) / (std::sqrt(e.variance) + s.eps);
}

/// Source: Chen et al. 2023, Algorithm 2. The direction's sign moves the weight by lr; zero does
/// not.
inline void update_lion(const StepScalars& s, float gradient, ElementState& e) {
  e.master = e.master * s.decay_factor;
  const float direction = e.momentum * s.beta1 + gradient * s.one_minus_beta1;
  if (direction != direction) {
    e.master = direction;
  } else if (direction != 0) {
    e.master = e.master + (direction > 0 ? -s.lr : s.lr);
  }
  e.momentum = e.momentum * s.beta2 + gradient * s.one_minus_beta2;
}

/// One step of one element. `gradient` is as it came; scale and sign are applied here, but not to
/// `square`, which is null but for Adam and AdamW.
/// NaN results are made the one quiet NaN 0x7fc00000, since the payload that arithmetic produces
/// differs between processors.
ElementState update_element(const StepScalars& scalars, float gradient, const float* square,
                            ElementState state);

}  // namespace smartinf::kernels
