// The update rules on vectors: the operations of rules.h in their order.
// Part of tile_kernels_simd.cc, which includes it once for every instruction set.
#if defined(SMARTINF_KERNELS_RULES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SMARTINF_KERNELS_RULES_INL_H_
#undef SMARTINF_KERNELS_RULES_INL_H_
#else
#define SMARTINF_KERNELS_RULES_INL_H_
#endif

#include <cstddef>

#include <hwy/highway.h>

#include "smartinf/kernels/casts-inl.h"
#include "smartinf/kernels/rules.h"
#include "smartinf/kernels/tile_kernels_simd.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
// One element per lane; the names are those of ElementState.
struct StateVectors {
  VF master;
  VF momentum;
  VF variance;
  VF root;    // of the variance; set by rules that keep one
  VF square;  // in place of the gradient's, for rules with kSquares
};

HWY_INLINE StateVectors zero_state() {
  const VF zero = hn::Zero(F32());
  return {.master = zero, .momentum = zero, .variance = zero, .root = zero, .square = zero};
}

// Each rule holds its scalars, one in every lane; update() does one step, and nan_probe() is NaN in
// a lane where any of the new values is.

// The L2 decay of Adam, SGD and Adagrad. kDecays: whether there is any.
template <bool kDecays>
struct GradientDecay {
  explicit GradientDecay(const StepScalars& s) : weight_decay(set(s.weight_decay)) {}
  HWY_INLINE VF operator()(VF gradient, VF master) const {
    if constexpr (!kDecays) return gradient;
    return hn::Add(gradient, hn::Mul(weight_decay, master));
  }
  VF weight_decay;
};

// The end of both forms of Adam, once they have the momentum.
struct AdamEnd {
  explicit AdamEnd(const StepScalars& s)
      : decay_factor(set(s.decay_factor)),
        beta2(set(s.beta2)),
        one_minus_beta2(set(s.one_minus_beta2)),
        minus_step_size(set(-s.step_size)),
        eps(set(s.eps)) {}
  HWY_INLINE VF share(VF gradient) const {
    return hn::Mul(hn::Mul(one_minus_beta2, gradient), gradient);
  }
  HWY_INLINE void operator()(VF variance, StateVectors& e) const {
    e.variance = variance;
    e.root = hn::Sqrt(e.variance);
    e.master =
        hn::Add(e.master, hn::Div(hn::Mul(minus_step_size, e.momentum), hn::Add(e.root, eps)));
  }
  VF decay_factor, beta2, one_minus_beta2, minus_step_size, eps;
};

// kNear: lerp() starts from the momentum, as it does for every usual beta1.
template <bool kDecays, bool kNear>
struct Adam {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = true;
  static constexpr bool kSquares = false;
  explicit Adam(const StepScalars& s)
      : decay(s), weight(set(kNear ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0f)), end(s) {}
  HWY_INLINE void update(VF gradient, StateVectors& e) const {
    e.master = hn::Mul(e.master, end.decay_factor);
    gradient = decay(gradient, e.master);
    const VF difference = hn::Mul(weight, hn::Sub(gradient, e.momentum));
    e.momentum = hn::Add(kNear ? e.momentum : gradient, difference);
    end(hn::Add(hn::Mul(e.variance, end.beta2), end.share(gradient)), e);
  }
  HWY_INLINE VF nan_probe(const StateVectors& e) const { return e.master; }

  GradientDecay<kDecays> decay;
  VF weight;
  AdamEnd end;
};

// Adam whose variance is given the squares of a gradient that it does not see whole. Rarer,
// so its cases are distinguished at run time.
struct AdamFactored {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = true;
  static constexpr bool kSquares = true;
  explicit AdamFactored(const StepScalars& s)
      : decays(s.weight_decay != 0),
        near(s.one_minus_beta1 < 0.5f),
        decay(s),
        weight(set(near ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0f)),
        end(s) {}
  HWY_INLINE void update(VF gradient, StateVectors& e) const {
    e.master = hn::Mul(e.master, end.decay_factor);
    if (decays) gradient = decay(gradient, e.master);
    const VF difference = hn::Mul(weight, hn::Sub(gradient, e.momentum));
    e.momentum = hn::Add(near ? e.momentum : gradient, difference);
    const VF given =
        hn::Add(hn::Mul(e.variance, end.beta2), hn::Mul(end.one_minus_beta2, e.square));
    // std::max() where one of them is NaN too.
    const VF own = end.share(gradient);
    end(hn::IfThenElse(hn::Lt(given, own), own, given), e);
  }
  HWY_INLINE VF nan_probe(const StateVectors& e) const { return e.master; }

  bool decays, near;
  GradientDecay<true> decay;
  VF weight;
  AdamEnd end;
};

template <bool kDecays>
struct Sgd {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = false;
  static constexpr bool kSquares = false;
  explicit Sgd(const StepScalars& s)
      : decay(s),
        forgets(s.first_step || s.beta1 == 0),
        nesterov(s.nesterov),
        beta1(set(s.beta1)),
        dampening_factor(set(s.dampening_factor)),
        minus_lr(set(-s.lr)) {}
  HWY_INLINE void update(VF gradient, StateVectors& e) const {
    gradient = decay(gradient, e.master);
    if (forgets) {
      e.momentum = gradient;
    } else {
      e.momentum = hn::Add(hn::Mul(e.momentum, beta1), hn::Mul(dampening_factor, gradient));
    }
    const VF direction = nesterov ? hn::Add(gradient, hn::Mul(beta1, e.momentum)) : e.momentum;
    e.master = hn::Add(e.master, hn::Mul(minus_lr, direction));
  }
  HWY_INLINE VF nan_probe(const StateVectors& e) const { return e.master; }

  GradientDecay<kDecays> decay;
  bool forgets, nesterov;
  VF beta1, dampening_factor, minus_lr;
};

template <bool kDecays>
struct Adagrad {
  static constexpr bool kMomentum = false;
  static constexpr bool kVariance = true;
  static constexpr bool kSquares = false;
  explicit Adagrad(const StepScalars& s)
      : decay(s),
        first_step(s.first_step),
        initial(set(s.initial_variance)),
        minus_step_size(set(-s.step_size)),
        eps(set(s.eps)) {}
  HWY_INLINE void update(VF gradient, StateVectors& e) const {
    gradient = decay(gradient, e.master);
    e.variance = hn::Add(first_step ? initial : e.variance, hn::Mul(gradient, gradient));
    e.root = hn::Sqrt(e.variance);
    e.master = hn::Add(e.master, hn::Div(hn::Mul(minus_step_size, gradient), hn::Add(e.root, eps)));
  }
  HWY_INLINE VF nan_probe(const StateVectors& e) const { return e.master; }

  GradientDecay<kDecays> decay;
  bool first_step;
  VF initial, minus_step_size, eps;
};

struct Lion {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = false;
  static constexpr bool kSquares = false;
  explicit Lion(const StepScalars& s)
      : decay_factor(set(s.decay_factor)),
        beta1(set(s.beta1)),
        one_minus_beta1(set(s.one_minus_beta1)),
        beta2(set(s.beta2)),
        one_minus_beta2(set(s.one_minus_beta2)),
        lr(set(s.lr)) {}
  HWY_INLINE void update(VF gradient, StateVectors& e) const {
    e.master = hn::Mul(e.master, decay_factor);
    const VF direction = hn::Add(hn::Mul(e.momentum, beta1), hn::Mul(gradient, one_minus_beta1));
    const VF zero = hn::Zero(F32());
    const VF down = hn::Sub(e.master, lr);
    const VF up = hn::Add(e.master, lr);
    e.master = hn::IfThenElse(hn::Gt(direction, zero), down, e.master);
    e.master = hn::IfThenElse(hn::Lt(direction, zero), up, e.master);
    e.master = hn::IfThenElse(hn::IsNaN(direction), direction, e.master);
    e.momentum = hn::Add(hn::Mul(e.momentum, beta2), hn::Mul(gradient, one_minus_beta2));
  }
  HWY_INLINE VF nan_probe(const StateVectors& e) const { return hn::Add(e.master, e.momentum); }

  VF decay_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};

HWY_INLINE bool any_nan(VF nan_probe) { return !hn::AllFalse(F32(), hn::IsNaN(nan_probe)); }

void canonicalize(float* values, size_t n) {
  for (size_t i = 0; i < n; ++i) values[i] = canonical(values[i]);
}

// Calls `work` with the type of the rule as its template argument.
template <typename Work>
HWY_INLINE void with_rule(const StepScalars& s, bool squares, const Work& work) {
  const bool decays = s.weight_decay != 0;
  switch (s.rule) {
    case UpdateRule::kAdamW:
    case UpdateRule::kAdam:
      if (squares) return work.template operator()<AdamFactored>();
      if (s.one_minus_beta1 < 0.5f) {
        return decays ? work.template operator()<Adam<true, true>>()
                      : work.template operator()<Adam<false, true>>();
      }
      return decays ? work.template operator()<Adam<true, false>>()
                    : work.template operator()<Adam<false, false>>();
    case UpdateRule::kSgdMomentum:
      return decays ? work.template operator()<Sgd<true>>()
                    : work.template operator()<Sgd<false>>();
    case UpdateRule::kAdagrad:
      return decays ? work.template operator()<Adagrad<true>>()
                    : work.template operator()<Adagrad<false>>();
    case UpdateRule::kLion:
      return work.template operator()<Lion>();
  }
}

HWY_INLINE VF gradient_scale(const StepScalars& s) {
  return set(s.maximize ? -s.gradient_scale : s.gradient_scale);
}

template <typename Rule>
void update_rule(const StepScalars& s, const float* gradient, float* master, float* momentum,
                 float* variance, size_t n, const float* squares) {
  const F32 f32;
  const size_t lanes = hn::Lanes(f32);
  const VF scale = gradient_scale(s);
  const Rule rule(s);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    StateVectors e = zero_state();
    e.master = hn::LoadU(f32, master + i);
    if constexpr (Rule::kMomentum) e.momentum = hn::LoadU(f32, momentum + i);
    if constexpr (Rule::kVariance) e.variance = hn::LoadU(f32, variance + i);
    if constexpr (Rule::kSquares) e.square = hn::LoadU(f32, squares + i);
    rule.update(hn::Mul(hn::LoadU(f32, gradient + i), scale), e);
    hn::StoreU(canonical_nan(e.master), f32, master + i);
    if constexpr (Rule::kMomentum) hn::StoreU(canonical_nan(e.momentum), f32, momentum + i);
    if constexpr (Rule::kVariance) hn::StoreU(canonical_nan(e.variance), f32, variance + i);
  }
  if (i < n) {
    scalar_tiles().update(s, gradient + i, master + i, Rule::kMomentum ? momentum + i : nullptr,
                          Rule::kVariance ? variance + i : nullptr, n - i,
                          squares == nullptr ? nullptr : squares + i);
  }
}

void update(const StepScalars& scalars, const float* gradient, float* master, float* momentum,
            float* variance, size_t n, const float* squares) {
  with_rule(scalars, squares != nullptr, [&]<typename Rule>() {
    update_rule<Rule>(scalars, gradient, master, momentum, variance, n, squares);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
