// The arithmetic of an update, one element at a time: the plain truth that every instruction set is
// compared with, and that OpenCL and FPGA kernels are made of. In the language of
// smartinf/base/arithmetic.h. Multiplications and additions stand in the order of torch.optim's
// single-tensor code; nothing is fused (docs/numerics.md).
#pragma once

#if !defined(__OPENCL_C_VERSION__)
#include "smartinf/base/arithmetic.h"
namespace smartinf {
namespace kernels {
using base::mix_seed;
#endif

SI_CONSTANT(uint32_t, kCanonicalNan) = 0x7fc00000u;
SI_CONSTANT(uint32_t, kInfinityBits) = 0x7f800000u;
SI_CONSTANT(uint32_t, kMagnitudeMask) = 0x7fffffffu;
SI_CONSTANT(uint32_t, kSignBit) = 0x80000000u;

/// NaN results are made the one quiet NaN, since the payload that arithmetic produces differs
/// between processors.
SI_FUNCTION SI_F32 canonical(SI_F32 value) {
  return value != value ? SI_FLOAT_OF(kCanonicalNan) : value;
}

// Update rules.

/// UpdateRule's numbers.
SI_CONSTANT(uint32_t, kRuleAdamW) = 0;
SI_CONSTANT(uint32_t, kRuleAdam) = 1;
SI_CONSTANT(uint32_t, kRuleSgdMomentum) = 2;
SI_CONSTANT(uint32_t, kRuleAdagrad) = 3;
SI_CONSTANT(uint32_t, kRuleLion) = 4;

/// The part of StepScalars that an element's update takes; words of 32 bits, the same on every
/// processor.
typedef struct RuleScalars {
  uint32_t rule;  // UpdateRule
  uint32_t skip;  // 1: state is left as it is
  uint32_t nesterov;
  uint32_t first_step;
  SI_F32 gradient_scale;  // negative to maximize
  SI_F32 lr;
  SI_F32 beta1;
  SI_F32 one_minus_beta1;
  SI_F32 beta2;
  SI_F32 one_minus_beta2;
  SI_F32 eps;
  SI_F32 decay_factor;
  SI_F32 weight_decay;
  SI_F32 step_size;
  SI_F32 dampening_factor;
  SI_F32 initial_variance;
} RuleScalars;

/// State that one element keeps between steps. A rule leaves alone what it does not keep.
typedef struct ElementState {
  SI_F32 master;
  SI_F32 momentum;
  SI_F32 variance;
} ElementState;

/// a + (b - a) * weight, from whichever end is nearer, as torch.lerp does: exact at both ends.
SI_FUNCTION SI_F32 lerp(SI_F32 a, SI_F32 b, SI_F32 weight) {
  const bool from_a = weight < 0.5f;  // chosen before the product, which hardware then has once
  return (from_a ? a : b) + (from_a ? weight : weight - 1.0f) * (b - a);
}

/// Adam and AdamW; they differ in which of the two decays is not neutral. square: what the variance
/// takes in place of the gradient's, if has_square (UpdateBlock::second_moment). With it the
/// variance is at least what this gradient alone would make of 0: what it adds to the momentum
/// moves the weight no further than if the variance had been 0.
/// Source: Kingma and Ba 2015, Algorithm 1 in the order of its section 2, where step size and eps
/// carry the bias corrections; Loshchilov and Hutter 2019, Algorithm 2.
SI_FUNCTION ElementState update_adam(RuleScalars s, SI_F32 gradient, bool has_square, SI_F32 square,
                                     ElementState e) {
  e.master = e.master * s.decay_factor;
  if (s.weight_decay != 0) gradient = gradient + s.weight_decay * e.master;
  e.momentum = lerp(e.momentum, gradient, s.one_minus_beta1);
  const SI_F32 share = (s.one_minus_beta2 * gradient) * gradient;
  if (has_square) {
    const SI_F32 given = e.variance * s.beta2 + s.one_minus_beta2 * square;
    e.variance = given < share ? share : given;
  } else {
    e.variance = e.variance * s.beta2 + share;
  }
  e.master = e.master + (-s.step_size * e.momentum) / (SI_SQRT(e.variance) + s.eps);
  return e;
}

/// SGD; momentum 0 keeps the last gradient as its momentum, which changes no weight.
/// Source: torch.optim.SGD; Sutskever et al. 2013 for Nesterov's form.
SI_FUNCTION ElementState update_sgd(RuleScalars s, SI_F32 gradient, ElementState e) {
  if (s.weight_decay != 0) gradient = gradient + s.weight_decay * e.master;
  if (s.first_step != 0 || s.beta1 == 0) {
    e.momentum = gradient;
  } else {
    e.momentum = e.momentum * s.beta1 + s.dampening_factor * gradient;
  }
  const SI_F32 direction = s.nesterov != 0 ? gradient + s.beta1 * e.momentum : e.momentum;
  e.master = e.master + -s.lr * direction;
  return e;
}

/// Source: Duchi, Hazan and Singer 2011, with torch.optim.Adagrad's options.
SI_FUNCTION ElementState update_adagrad(RuleScalars s, SI_F32 gradient, ElementState e) {
  if (s.weight_decay != 0) gradient = gradient + s.weight_decay * e.master;
  const SI_F32 sum = s.first_step != 0 ? s.initial_variance : e.variance;
  e.variance = sum + gradient * gradient;
  e.master = e.master + (-s.step_size * gradient) / (SI_SQRT(e.variance) + s.eps);
  return e;
}

/// Source: Chen et al. 2023, Algorithm 2. The direction's sign moves the weight by lr; zero does
/// not.
SI_FUNCTION ElementState update_lion(RuleScalars s, SI_F32 gradient, ElementState e) {
  e.master = e.master * s.decay_factor;
  const SI_F32 direction = e.momentum * s.beta1 + gradient * s.one_minus_beta1;
  if (direction != direction) {
    e.master = direction;
  } else if (direction != 0) {
    e.master = e.master + (direction > 0 ? -s.lr : s.lr);
  }
  e.momentum = e.momentum * s.beta2 + gradient * s.one_minus_beta2;
  return e;
}

/// One step of one element. `gradient` is as it came; scale and sign are applied here, but not to
/// `square`, which only Adam and AdamW have.
SI_FUNCTION ElementState update_element(RuleScalars s, SI_F32 gradient, bool has_square,
                                        SI_F32 square, ElementState e) {
  gradient = gradient * s.gradient_scale;
  if (s.rule == kRuleSgdMomentum) {
    e = update_sgd(s, gradient, e);
  } else if (s.rule == kRuleAdagrad) {
    e = update_adagrad(s, gradient, e);
  } else if (s.rule == kRuleLion) {
    e = update_lion(s, gradient, e);
  } else {
    e = update_adam(s, gradient, has_square, square, e);
  }
  e.master = canonical(e.master);
  e.momentum = canonical(e.momentum);
  e.variance = canonical(e.variance);
  return e;
}

// State formats. Every rounding is stochastic, its random bits a function of (seed, step, element).

/// The random numbers of one group of 256 elements in one step: for element `lane`
/// start + lane * stride, 15 random bits on top and a one below them, which is half of what they
/// leave out. With random start and stride such numbers are uniform, and those of two elements
/// are as good as independent (Dietzfelbinger 1996: exactly so but for strides' even multiples,
/// which at 128 lanes apart still take 256 values evenly); a vector of the next ones costs one
/// addition. Groups are aligned in the parameter space: the numbers do not depend on subgroups,
/// devices or threads.
typedef struct Progression {
  uint32_t start;
  uint32_t stride;
} Progression;
typedef struct RoundingKey {
  Progression momentum;
  Progression variance;
} RoundingKey;

SI_CONSTANT(uint32_t, kRandomBits) = 15;
SI_CONSTANT(uint32_t, kGroupElements) = 256;  // base::kQ8GroupElements

/// The seed that the groups of a step share.
SI_FUNCTION uint64_t rounding_seed(uint64_t seed, uint64_t step) { return mix_seed(seed, step); }

/// The nth kRandomBits of a word, in the upper bits.
SI_FUNCTION uint32_t random_field(uint64_t word, uint32_t nth) {
  return (uint32_t)(word >> (nth * kRandomBits)) << (32 - kRandomBits);
}

/// `element` is the group's first, a multiple of kGroupElements.
SI_FUNCTION RoundingKey rounding_key(uint64_t step_seed, uint64_t element) {
  const uint64_t word = mix_seed(step_seed, element / kGroupElements);
  const uint32_t half_way = 1u << (31 - kRandomBits);
  RoundingKey key;
  key.momentum.start = random_field(word, 0) | half_way;
  key.momentum.stride = random_field(word, 1);
  key.variance.start = random_field(word, 2) | half_way;
  key.variance.stride = random_field(word, 3);
  return key;
}

SI_FUNCTION uint32_t random_at(Progression numbers, uint32_t lane) {
  return numbers.start + lane * numbers.stride;
}

/// Truncation after adding a random number below the kept bits: up with probability equal to the
/// fraction cut off. Infinity stays, NaN becomes canonical.
SI_FUNCTION uint16_t round_bf16(SI_F32 value, uint32_t random) {
  const uint32_t bits = SI_UINT_OF(value);
  if ((bits & kMagnitudeMask) > kInfinityBits) return (uint16_t)(kCanonicalNan >> 16);
  return (uint16_t)((bits + (random >> 16)) >> 16);
}

// q8. A code is the upper part of an f32 between 2 and 512: three bits of exponent, then 4 bits of
// mantissa and a sign (momentum) or 5 bits of mantissa (root of the variance). That number less 2,
// times the group's step, is what the code stands for: even spacing near zero, then spacing in
// proportion to the value, from 3.1% to 6.2% for a momentum and half that for a root. Encoding adds
// random bits below the kept ones and cuts, as for bf16, which is unbiased; there is no table and
// no root to take. The steps are such that the group's largest value has the largest code.
SI_CONSTANT(SI_F32, kCodeBias) = 2.0f;
SI_CONSTANT(uint32_t, kCodeBiasBits) = 0x40000000u;
SI_CONSTANT(int, kMomentumCut) = 19;  // lower bits of the f32 that a code leaves out
SI_CONSTANT(int, kVarianceCut) = 18;
SI_CONSTANT(uint32_t, kMomentumCodes) = 128;  // of each sign
SI_CONSTANT(uint32_t, kVarianceCodes) = 256;

/// Value that a code stands for, in steps. code < kMomentumCodes or kVarianceCodes.
SI_FUNCTION SI_F32 code_value(uint32_t code, int cut) {
  return SI_FLOAT_OF(kCodeBiasBits | (code << cut)) - kCodeBias;
}
SI_CONSTANT(SI_F32, kMomentumTop) = 494.0f;  // the largest code's value: 496 - 2
SI_CONSTANT(SI_F32, kVarianceTop) = 502.0f;  // 504 - 2

/// A random number below a cut. It is never within 3 of either end: a value that already is on a
/// code, but for the rounding of its product with 1/step, stays there with certainty.
SI_FUNCTION uint32_t noise_below(uint32_t random, int cut) { return random >> (32 - cut); }

/// Groups whose largest momentum is below this become zeros: 1/step must stay finite.
SI_CONSTANT(uint32_t, kSmallestGroupBits) = 0x0d800000u;  // 2^-100

/// The step stored for a group, from the largest (bits & kMagnitudeMask) of its momenta or of its
/// variances' roots. A group with an infinity or NaN becomes all NaN: broken numbers must not
/// vanish.
SI_FUNCTION SI_F32 momentum_step(uint32_t magnitude_bits) {
  if (magnitude_bits >= kInfinityBits) return SI_FLOAT_OF(kCanonicalNan);
  return magnitude_bits < kSmallestGroupBits ? 0.0f : SI_FLOAT_OF(magnitude_bits) / kMomentumTop;
}
SI_FUNCTION SI_F32 variance_step(uint32_t magnitude_bits) {
  if (magnitude_bits >= kInfinityBits) return SI_FLOAT_OF(kCanonicalNan);
  return SI_FLOAT_OF(magnitude_bits) / kVarianceTop;
}

/// 1/step for encoding, or 0 for groups that have only zero codes.
SI_FUNCTION SI_F32 group_inverse(SI_F32 step) { return step > 0 ? 1.0f / step : 0.0f; }

/// One of the two codes around the value, right on average; sign and magnitude. `inverse` is not 0.
SI_FUNCTION uint8_t encode_momentum(SI_F32 value, SI_F32 inverse, uint32_t random) {
  const SI_F32 steps = value * inverse;
  const SI_F32 bias = SI_FLOAT_OF(kCodeBiasBits | (SI_UINT_OF(steps) & kSignBit));
  const uint32_t bits = SI_UINT_OF(steps + bias) + noise_below(random, kMomentumCut);
  return (uint8_t)(((bits >> kMomentumCut) & (kMomentumCodes - 1)) |
                   (bits >> 31 != 0 ? kMomentumCodes : 0u));
}

SI_FUNCTION SI_F32 decode_momentum(uint8_t code, SI_F32 step) {
  const SI_F32 magnitude = code_value(code & (kMomentumCodes - 1), kMomentumCut) * step;
  const uint32_t sign = (code & kMomentumCodes) != 0 ? kSignBit : 0u;
  return SI_FLOAT_OF(SI_UINT_OF(magnitude) | sign);
}

/// As above for a variance's root. Only +0 gets code 0: a variance lost while its momentum is not
/// would make the next weight jump.
SI_FUNCTION uint8_t encode_root(SI_F32 root, SI_F32 inverse, uint32_t random) {
  const uint32_t bits = SI_UINT_OF(root * inverse + kCodeBias) + noise_below(random, kVarianceCut);
  const uint32_t code = (bits >> kVarianceCut) & (kVarianceCodes - 1);
  return (uint8_t)(code == 0 && SI_UINT_OF(root) != 0 ? 1u : code);
}

SI_FUNCTION SI_F32 decode_variance(uint8_t code, SI_F32 step) {
  const SI_F32 root = code_value(code, kVarianceCut) * step;
  return root * root;
}

/// Where the code of a group's element lies: in a whole group byte j of 32-bit word w belongs to
/// element 64 j + w, so that vectors of any length pack and unpack codes by shifts alone. Short
/// groups, at the end of a plane, are in order.
SI_CONSTANT(uint32_t, kCodeWords) = 64;
SI_FUNCTION size_t code_position(size_t lane, size_t group_elements) {
  if (group_elements < kGroupElements) return lane;
  return lane % kCodeWords * 4 + lane / kCodeWords;
}

#if !defined(__OPENCL_C_VERSION__)
}  // namespace kernels
}  // namespace smartinf
#endif
