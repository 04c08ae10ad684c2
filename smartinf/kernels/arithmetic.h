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
SI_CONSTANT(uint32_t, kGroupElements) = 256;  // base::kCodeGroupElements

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

/// Random numbers of the group's master weights, from a word of their own.
SI_FUNCTION Progression master_rounding(uint64_t step_seed, uint64_t element) {
  const uint64_t word = mix_seed(~step_seed, element / kGroupElements);
  Progression numbers;
  numbers.start = random_field(word, 0) | 1u << (31 - kRandomBits);
  numbers.stride = random_field(word, 1);
  return numbers;
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

// m24: the upper 24 bits of an f32, as two planes of a block: upper halves, and the bytes below.

SI_CONSTANT(int, kM24Cut) = 8;  // lower bits that are left out

/// The f32 that is stored: round_bf16() with 24 bits kept.
SI_FUNCTION uint32_t round_m24(SI_F32 value, uint32_t random) {
  const uint32_t bits = SI_UINT_OF(value);
  if ((bits & kMagnitudeMask) > kInfinityBits) return kCanonicalNan;
  return (bits + (random >> (32 - kM24Cut))) >> kM24Cut << kM24Cut;
}

SI_FUNCTION SI_F32 decode_m24(uint16_t upper, uint8_t lower) {
  return SI_FLOAT_OF((uint32_t)upper << 16 | (uint32_t)lower << kM24Cut);
}

// q8 and q4. A code is the upper part of an f32 from 2 up to 512: three bits of exponent, then bits
// of mantissa, in q8 4 and a sign for a momentum or 5 for the root of a variance, in q4 none and a
// sign or 1. That number less a bias, times the group's step, is what the code stands for: even
// spacing near zero, then spacing in proportion to the value. Encoding adds random bits below the
// kept ones and cuts, as for bf16, which is unbiased; there is no table and no root to take. The
// steps are such that the group's largest value has the largest code. The bias is 2, so that the
// smallest code is zero, but for roots in q4, where it is 1: a momentum that was rounded up from
// nothing must not stand over a root that was rounded down to nothing. `bits` is 8 or 4 throughout.
SI_CONSTANT(uint32_t, kCodeBiasBits) = 0x40000000u;  // of 2.0f, the smallest such number

SI_CONSTANT_FUNCTION SI_F32 root_bias(int bits) { return bits == 8 ? 2.0f : 1.0f; }

/// Lower bits of the f32 that a code leaves out.
SI_CONSTANT_FUNCTION int momentum_cut(int bits) { return bits == 8 ? 19 : 23; }
SI_CONSTANT_FUNCTION int root_cut(int bits) { return bits == 8 ? 18 : 22; }

/// Codes of momenta of either sign, and codes of roots.
SI_CONSTANT_FUNCTION uint32_t momentum_codes(int bits) { return 1u << (bits - 1); }
SI_CONSTANT_FUNCTION uint32_t root_codes(int bits) { return 1u << bits; }

/// Values of the largest codes, in steps: 496 - 2, 256 - 2; 504 - 2, 384 - 1.
SI_CONSTANT_FUNCTION SI_F32 momentum_top(int bits) { return bits == 8 ? 494.0f : 254.0f; }
SI_CONSTANT_FUNCTION SI_F32 root_top(int bits) { return bits == 8 ? 502.0f : 383.0f; }

/// Value that a code stands for, in steps.
SI_FUNCTION SI_F32 code_value(uint32_t code, int cut, SI_F32 bias) {
  return SI_FLOAT_OF(kCodeBiasBits | (code << cut)) - bias;
}

/// A random number below a cut. It is never within 3 of either end: a value that already is on a
/// code, but for the rounding of its product with 1/step, stays there with certainty.
SI_FUNCTION uint32_t noise_below(uint32_t random, int cut) { return random >> (32 - cut); }

/// Groups whose largest momentum is below this become zeros: 1/step must stay finite.
SI_CONSTANT(uint32_t, kSmallestGroupBits) = 0x0d800000u;  // 2^-100

/// The step stored for a group, from the largest (bits & kMagnitudeMask) of its momenta or of its
/// variances' roots. A group with an infinity or NaN becomes all NaN: broken numbers must not
/// vanish.
SI_FUNCTION SI_F32 momentum_step(int bits, uint32_t magnitude_bits) {
  if (magnitude_bits >= kInfinityBits) return SI_FLOAT_OF(kCanonicalNan);
  return magnitude_bits < kSmallestGroupBits ? 0.0f
                                             : SI_FLOAT_OF(magnitude_bits) / momentum_top(bits);
}
SI_FUNCTION SI_F32 root_step(int bits, uint32_t magnitude_bits) {
  if (magnitude_bits >= kInfinityBits) return SI_FLOAT_OF(kCanonicalNan);
  return SI_FLOAT_OF(magnitude_bits) / root_top(bits);
}

/// 1/step for encoding, or 0 for groups that have only zero codes.
SI_FUNCTION SI_F32 group_inverse(SI_F32 step) { return step > 0 ? 1.0f / step : 0.0f; }

/// One of the two codes around the value, right on average; sign and magnitude. `inverse` is not 0.
SI_FUNCTION uint8_t encode_momentum(int bits, SI_F32 value, SI_F32 inverse, uint32_t random) {
  const SI_F32 steps = value * inverse;
  const SI_F32 bias = SI_FLOAT_OF(kCodeBiasBits | (SI_UINT_OF(steps) & kSignBit));
  const int cut = momentum_cut(bits);
  const uint32_t moved = SI_UINT_OF(steps + bias) + noise_below(random, cut);
  return (uint8_t)(((moved >> cut) & (momentum_codes(bits) - 1)) |
                   (moved >> 31 != 0 ? momentum_codes(bits) : 0u));
}

SI_FUNCTION SI_F32 decode_momentum(int bits, uint8_t code, SI_F32 step) {
  const uint32_t magnitude_code = code & (momentum_codes(bits) - 1);
  const SI_F32 magnitude = code_value(magnitude_code, momentum_cut(bits), 2.0f) * step;
  const uint32_t sign = (code & momentum_codes(bits)) != 0 ? kSignBit : 0u;
  return SI_FLOAT_OF(SI_UINT_OF(magnitude) | sign);
}

/// The code of a variance's root, likewise. In q8 only +0 gets code 0: a variance lost while its momentum is
/// not would make the next weight jump. In q4 what is smaller than the smallest code becomes it.
SI_FUNCTION uint8_t encode_root(int bits, SI_F32 root, SI_F32 inverse, uint32_t random) {
  const SI_F32 biased = root * inverse + root_bias(bits);
  const uint32_t least = SI_UINT_OF(biased) < kCodeBiasBits ? kCodeBiasBits : SI_UINT_OF(biased);
  const int cut = root_cut(bits);
  const uint32_t code = ((least + noise_below(random, cut)) >> cut) & (root_codes(bits) - 1);
  return (uint8_t)(bits == 8 && code == 0 && SI_UINT_OF(root) != 0 ? 1u : code);
}

SI_FUNCTION SI_F32 decode_variance(int bits, uint8_t code, SI_F32 step) {
  const SI_F32 root = code_value(code, root_cut(bits), root_bias(bits)) * step;
  return root * root;
}

/// 32-bit words of a whole group's codes. Vectors of any length pack and unpack codes by shifts
/// alone: the code in the `bits` from bits * j on of word w belongs to element words * j + w. Short
/// groups, at the end of a plane, are in order.
SI_CONSTANT_FUNCTION uint32_t code_words(int bits) { return kGroupElements / 32 * (uint32_t)bits; }

/// Where the code of a group's element lies, in units of `bits`, the lower half of a byte first.
SI_FUNCTION size_t code_position(int bits, size_t lane, size_t group_elements) {
  if (group_elements < kGroupElements) return lane;
  const size_t words = code_words(bits);
  return lane % words * (kGroupElements / words) + lane / words;
}

#if !defined(__OPENCL_C_VERSION__)
}  // namespace kernels
}  // namespace smartinf
#endif
