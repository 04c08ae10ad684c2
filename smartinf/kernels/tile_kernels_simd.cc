// Every tile stage as one Highway body, compiled once for each instruction set. The operations and
// their order are those of rules.h and state_codec.h, and no product is fused with a sum, so that
// all sets give the bits of the scalar truth. Elements that do not fill a vector go through the
// scalar truth itself.
#include "smartinf/kernels/tile_kernels_simd.h"

#include <algorithm>
#include <type_traits>

#include "smartinf/kernels/rules.h"
#include "smartinf/kernels/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "smartinf/kernels/tile_kernels_simd.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // a baseline that Highway may compile, and that never runs
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using base::DataType;
using base::PlaneKind;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;
using U8 = hn::Rebind<uint8_t, F32>;
using F64 = hn::ScalableTag<double>;
using VF = hn::Vec<F32>;
using VI = hn::Vec<I32>;
using VU = hn::Vec<U32>;

HWY_INLINE VF set(float value) { return hn::Set(F32(), value); }
HWY_INLINE VU set_bits(uint32_t bits) { return hn::Set(U32(), bits); }
HWY_INLINE VU bits_of(VF value) { return hn::BitCast(U32(), value); }
HWY_INLINE VF float_of(VU bits) { return hn::BitCast(F32(), bits); }

// Magnitude bits are below 2^31, where signed comparison (the cheap one) is right.
HWY_INLINE hn::Mask<F32> bits_above(VU magnitude, uint32_t limit) {
  const I32 i32;
  return hn::RebindMask(
      F32(), hn::Gt(hn::BitCast(i32, magnitude), hn::Set(i32, static_cast<int32_t>(limit))));
}

HWY_INLINE VF canonical_nan(VF value) {
  return hn::IfThenElse(hn::IsNaN(value), float_of(set_bits(kCanonicalNan)), value);
}

// ---- casts ----

HWY_INLINE VF load_bf16(const uint16_t* in) {
  return float_of(hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), in))));
}

// F16C and NEON convert f16 exactly as the scalar truth does; below them it takes integers.
#undef SI_NATIVE_F16
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
#define SI_NATIVE_F16 1
#else
#define SI_NATIVE_F16 0
#endif

HWY_INLINE VF load_f16(const uint16_t* in) {
#if SI_NATIVE_F16
  const hn::Rebind<hwy::float16_t, F32> f16;
  return hn::PromoteTo(F32(), hn::LoadU(f16, reinterpret_cast<const hwy::float16_t*>(in)));
#else
  const VU half = hn::PromoteTo(U32(), hn::LoadU(U16(), in));
  const VU magnitude = hn::And(half, set_bits(0x7fffu));
  // The exponent is rebiased by a product, which also gives denormals their leading one: exact.
  VU wide = bits_of(hn::Mul(float_of(hn::ShiftLeft<13>(magnitude)), set(0x1p112f)));
  const VF special = float_of(hn::Or(wide, set_bits(kInfinityBits)));
  const VF quiet = float_of(hn::Or(bits_of(special), set_bits(0x00400000u)));
  VF value = hn::IfThenElse(bits_above(magnitude, 0x7bffu), special, float_of(wide));
  value = hn::IfThenElse(bits_above(magnitude, 0x7c00u), quiet, value);
  const VU sign = hn::ShiftLeft<16>(hn::AndNot(set_bits(0x7fffu), half));
  return float_of(hn::Or(bits_of(value), sign));
#endif
}

// The upper halves of one vector or of two in a row.
HWY_INLINE void store_upper_halves(VU bits, uint16_t* out) {
  hn::StoreU(hn::TruncateTo(U16(), hn::ShiftRight<16>(bits)), U16(), out);
}
HWY_INLINE void store_upper_halves(VU first, VU second, uint16_t* out) {
  const hn::Repartition<uint16_t, U32> halves;
  hn::StoreU(hn::ConcatOdd(halves, hn::BitCast(halves, second), hn::BitCast(halves, first)), halves,
             out);
}

// Rounds a number that is no NaN, but the canonical one, to bf16 in the upper half.
HWY_INLINE VU round_bf16_nearest(VF value) {
  const VU bits = bits_of(value);
  const auto odd = hn::TestBit(bits, set_bits(0x10000u));
  return hn::Add(bits, hn::IfThenElse(odd, set_bits(0x8000u), set_bits(0x7fffu)));
}

HWY_INLINE void store_bf16(VF value, uint16_t* out) {
  const VU quiet = hn::Or(bits_of(value), set_bits(0x00400000u));
  const VF rounded = float_of(round_bf16_nearest(value));
  store_upper_halves(bits_of(hn::IfThenElse(hn::IsNaN(value), float_of(quiet), rounded)), out);
}

HWY_INLINE void store_f16(VF value, uint16_t* out) {
#if SI_NATIVE_F16
  const hn::Rebind<hwy::float16_t, F32> f16;
  hn::StoreU(hn::DemoteTo(f16, value), f16, reinterpret_cast<hwy::float16_t*>(out));
#else
  const VU bits = bits_of(value);
  const VU magnitude = hn::And(bits, set_bits(kMagnitudeMask));
  const VU sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
  // Normal results: rebias and round as integers.
  const VU rebiased = hn::Sub(magnitude, set_bits(0x38000000u));
  const VU odd = hn::And(hn::ShiftRight<13>(rebiased), set_bits(1));
  const VU normal = hn::ShiftRight<13>(hn::Add(hn::Add(rebiased, set_bits(0x0fffu)), odd));
  // Denormal results: adding 0.5 puts the last kept bit at the last place of an f32, so the
  // addition itself rounds.
  const VU denormal =
      hn::Sub(bits_of(hn::Add(float_of(magnitude), set(0.5f))), set_bits(0x3f000000u));
  const VU nan =
      hn::Or(set_bits(0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), set_bits(0x03ffu)));
  VF half =
      hn::IfThenElse(bits_above(magnitude, 0x387fffffu), float_of(normal), float_of(denormal));
  half = hn::IfThenElse(bits_above(magnitude, 0x477fefffu), float_of(set_bits(0x7c00u)), half);
  half = hn::IfThenElse(bits_above(magnitude, kInfinityBits), float_of(nan), half);
  hn::StoreU(hn::TruncateTo(U16(), hn::Or(bits_of(half), sign)), U16(), out);
#endif
}

void widen(const void* in, DataType type, float* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  const auto* half = static_cast<const uint16_t*>(in);
  size_t i = 0;
  switch (type) {
    case DataType::kF32:
      break;  // memcpy by the scalar truth
    case DataType::kBf16:
      for (; i + lanes <= n; i += lanes) hn::StoreU(load_bf16(half + i), F32(), out + i);
      break;
    case DataType::kF16:
      for (; i + lanes <= n; i += lanes) hn::StoreU(load_f16(half + i), F32(), out + i);
      break;
  }
  if (i < n) {
    scalar_tiles().widen(static_cast<const std::byte*>(in) + i * base::data_type_bytes(type), type,
                         out + i, n - i);
  }
}

void narrow(const float* in, void* out, DataType type, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  auto* half = static_cast<uint16_t*>(out);
  size_t i = 0;
  switch (type) {
    case DataType::kF32:
      break;
    case DataType::kBf16:
      for (; i + lanes <= n; i += lanes) store_bf16(hn::LoadU(F32(), in + i), half + i);
      break;
    case DataType::kF16:
      for (; i + lanes <= n; i += lanes) store_f16(hn::LoadU(F32(), in + i), half + i);
      break;
  }
  if (i < n) {
    scalar_tiles().narrow(in + i, static_cast<std::byte*>(out) + i * base::data_type_bytes(type),
                          type, n - i);
  }
}

// ---- rules ----

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

// What Adam, SGD and Adagrad do with L2 decay. kDecays: whether there is any.
template <bool kDecays>
struct GradientDecay {
  explicit GradientDecay(const StepScalars& s) : weight_decay(set(s.weight_decay)) {}
  HWY_INLINE VF operator()(VF gradient, VF master) const {
    if constexpr (!kDecays) return gradient;
    return hn::Add(gradient, hn::Mul(weight_decay, master));
  }
  VF weight_decay;
};

// What both forms of Adam do once they have the momentum.
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
// so its cases are told apart at run time.
struct AdamOfSquares {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = true;
  static constexpr bool kSquares = true;
  explicit AdamOfSquares(const StepScalars& s)
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
      if (squares) return work.template operator()<AdamOfSquares>();
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

// ---- state codecs ----

// The random numbers of a group, a vector at a time.
class RandomVectors {
 public:
  RandomVectors() = default;
  // Steps of `stride` lanes lie between one vector and the next.
  HWY_INLINE RandomVectors(const Progression& numbers, size_t stride)
      : next_(hn::Add(set_bits(numbers.start),
                      hn::Mul(hn::Iota(U32(), 0), set_bits(numbers.stride)))),
        step_(set_bits(numbers.stride * static_cast<uint32_t>(stride))) {}
  HWY_INLINE VU next() {
    const VU now = next_;
    next_ = hn::Add(next_, step_);
    return now;
  }

 private:
  VU next_;
  VU step_;
};

// Random bits added below the upper half: round_bf16() of a number that is no NaN, but the
// canonical one.
HWY_INLINE VU round_bf16_random(VF value, VU random) {
  return hn::Add(bits_of(value), hn::ShiftRight<16>(random));
}

void encode_bf16(PlaneKind kind, RoundingKey key, const float* in, uint16_t* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  RandomVectors random(progression(key, kind), lanes);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF value = canonical_nan(hn::LoadU(F32(), in + i));
    store_upper_halves(round_bf16_random(value, random.next()), out + i);
  }
  for (; i < n; ++i) {
    out[i] = round_bf16(in[i], random_number(key, kind, i));
  }
}

// An f32 whose upper part is the value's code: the bits above the cut of its plane.
template <PlaneKind kKind>
HWY_INLINE VU encode(VF value, VF inverse, VU random) {
  constexpr int kCut = kKind == PlaneKind::kVariance ? kVarianceCut : kMomentumCut;
  const VF steps = hn::Mul(value, inverse);
  VF bias = set(kCodeBias);
  if constexpr (kKind == PlaneKind::kMomentum) {
    bias = float_of(hn::OrAnd(bits_of(bias), bits_of(steps), set_bits(kSignBit)));
  }
  const VU noise = hn::ShiftRight<32 - kCut>(random);
  return hn::Add(bits_of(hn::Add(steps, bias)), noise);
}

// (z - kCodeBias) * step. The difference is exact and so is 2 * step: fused it is the same number.
HWY_INLINE VF code_times_step(VU z, VF step) {
#if HWY_NATIVE_FMA
  // A product, not a negation: the step of a broken group must stay the canonical NaN.
  return hn::MulAdd(float_of(z), step, hn::Mul(step, set(-kCodeBias)));
#else
  return hn::Mul(hn::Sub(float_of(z), set(kCodeBias)), step);
#endif
}
static_assert(kCodeBias == 2.0f);

// What the codes in byte kByte of each lane stand for.
template <PlaneKind kKind, int kByte>
HWY_INLINE VF decode(VU words, VF step) {
  // The code's bits move from 8 * kByte to `cut`.
  const auto at_cut = [words](auto cut) {
    if constexpr (cut >= 8 * kByte) {
      return hn::ShiftLeft<cut - 8 * kByte>(words);
    } else {
      return hn::ShiftRight<8 * kByte - cut>(words);
    }
  };
  if constexpr (kKind == PlaneKind::kVariance) {
    const VU code = at_cut(std::integral_constant<int, kVarianceCut>());
    const VU bits =
        hn::OrAnd(set_bits(kCodeBiasBits), code, set_bits((kVarianceCodes - 1) << kVarianceCut));
    const VF root = code_times_step(bits, step);
    return hn::Mul(root, root);
  } else {
    const VU code = at_cut(std::integral_constant<int, kMomentumCut>());
    const VU bits =
        hn::OrAnd(set_bits(kCodeBiasBits), code, set_bits((kMomentumCodes - 1) << kMomentumCut));
    const VF magnitude = code_times_step(bits, step);
    const VU sign = hn::ShiftLeft<24 - 8 * kByte>(words);
    return float_of(hn::OrAnd(bits_of(magnitude), sign, set_bits(kSignBit)));
  }
}

// The upper halves of two vectors, the first's in the lower half of each lane.
HWY_INLINE VU upper_halves(VU lower, VU upper) {
  const hn::Repartition<uint16_t, U32> halves;
  return hn::BitCast(U32(), hn::OddEven(hn::BitCast(halves, upper),
                                        hn::BitCast(halves, hn::ShiftRight<16>(lower))));
}

HWY_INLINE VU select_bits(uint32_t mask, VU yes, VU no) {
  return hn::Or(hn::And(set_bits(mask), yes), hn::AndNot(set_bits(mask), no));
}

// Words of codes, byte j of a lane from what encode() made of vector j. In halves: two vectors at a
// time.
template <PlaneKind kKind>
HWY_INLINE VU pack_codes(VU bits0, VU bits1, VU bits2, VU bits3) {
  const VU even = upper_halves(bits0, bits2);
  const VU odd = upper_halves(bits1, bits3);
  if constexpr (kKind == PlaneKind::kVariance) {
    return select_bits(0x00ff00ffu, hn::ShiftRight<kVarianceCut - 16>(even),
                       hn::ShiftLeft<24 - kVarianceCut>(odd));
  } else {
    const VU magnitudes = select_bits(0x007f007fu, hn::ShiftRight<kMomentumCut - 16>(even),
                                      hn::ShiftLeft<24 - kMomentumCut>(odd));
    const VU signs = select_bits(0x00ff00ffu, hn::ShiftRight<8>(even), odd);
    return select_bits(0x80808080u, signs, magnitudes);
  }
}

/// Momenta or roots of variances of a group that is about to be encoded.
struct GroupValues {
  alignas(64) float values[kTileElements];
};

// The largest magnitude of a group, NaN of either sign being larger than any number.
HWY_INLINE VI largest_of(const GroupValues& group) {
  VI largest = hn::Zero(I32());
  for (size_t i = 0; i < kTileElements; i += hn::Lanes(F32())) {
    const VF value = hn::Load(F32(), group.values + i);
    largest = hn::Max(largest, hn::BitCast(I32(), hn::Abs(value)));
  }
  return largest;
}

// The larger magnitude. Which it is where either is NaN differs between targets.
HWY_INLINE VI larger_magnitude(VI largest, VF value) {
#if HWY_TARGET == HWY_AVX3
  constexpr int kMagnitudes = 3 | 2 << 2;  // of both, the sign dropped
  return hn::BitCast(I32(),
                     VF{_mm512_range_ps(hn::BitCast(F32(), largest).raw, value.raw, kMagnitudes)});
#else
  return hn::Max(largest, hn::BitCast(I32(), hn::Abs(value)));
#endif
}

/// Encodes a group a column at a time: elements word + lane + 64 j, which share words.
template <PlaneKind kKind>
class GroupEncoder {
 public:
  GroupEncoder() = default;
  GroupEncoder(const GroupValues& group, float step, const Progression& numbers, uint8_t* out)
      : values_(group.values),
        out_(reinterpret_cast<uint32_t*>(out)),
        inverse_(set(group_inverse(step))),
        quarter_(set_bits(numbers.stride * static_cast<uint32_t>(kCodeWords))),
        random_(numbers, hn::Lanes(F32())) {}

  HWY_INLINE void column(size_t word) {
    const float* values = values_ + word;
    const VU random0 = random_.next();
    const VU random1 = hn::Add(random0, quarter_);
    const VU random2 = hn::Add(random1, quarter_);
    const VU random3 = hn::Add(random2, quarter_);
    const VU words = pack_codes<kKind>(
        encode<kKind>(hn::Load(F32(), values), inverse_, random0),
        encode<kKind>(hn::Load(F32(), values + kCodeWords), inverse_, random1),
        encode<kKind>(hn::Load(F32(), values + 2 * kCodeWords), inverse_, random2),
        encode<kKind>(hn::Load(F32(), values + 3 * kCodeWords), inverse_, random3));
    hn::StoreU(words, U32(), out_ + word);
    if constexpr (kKind == PlaneKind::kVariance) {
      smallest_ = hn::Min(smallest_, hn::BitCast(hn::Repartition<uint8_t, U32>(), words));
    }
  }

  /// To be called after the last column.
  HWY_INLINE void finish() {
    if constexpr (kKind == PlaneKind::kVariance) {
      const hn::Repartition<uint8_t, U32> u8;
      if (HWY_UNLIKELY(!hn::AllFalse(u8, hn::Eq(smallest_, hn::Zero(u8))))) keep_above_zero();
    }
  }

  HWY_INLINE void all() {
    for (size_t word = 0; word < kCodeWords; word += hn::Lanes(F32())) column(word);
    finish();
  }

 private:
  /// Only +0 gets code 0.
  HWY_NOINLINE void keep_above_zero() {
    const hn::Repartition<uint8_t, U32> u8;
    // 1 in the byte of a root that is not 0; such roots of f32 have more than this as bits.
    const auto least = [&](size_t word, int byte) HWY_ATTR {
      const VF root = hn::Load(F32(), values_ + word + static_cast<size_t>(byte) * kCodeWords);
      return hn::Min(bits_of(root), set_bits(1u << (8 * byte)));
    };
    for (size_t word = 0; word < kCodeWords; word += hn::Lanes(F32())) {
      const VU ones =
          hn::Or(hn::Or(least(word, 0), least(word, 1)), hn::Or(least(word, 2), least(word, 3)));
      const VU words = hn::LoadU(U32(), out_ + word);
      hn::StoreU(hn::BitCast(U32(), hn::Max(hn::BitCast(u8, words), hn::BitCast(u8, ones))), U32(),
                 out_ + word);
    }
  }

  const float* values_ = nullptr;
  uint32_t* out_ = nullptr;
  hn::Vec<hn::Repartition<uint8_t, U32>> smallest_ = hn::Set(hn::Repartition<uint8_t, U32>(), 255);
  VF inverse_ = hn::Zero(F32());
  VU quarter_ = hn::Zero(U32());
  RandomVectors random_;
};

/// The step of a group whose largest magnitude is known.
template <PlaneKind kKind>
HWY_INLINE float step_of(VI largest) {
  return group_step(kKind, static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(I32(), largest))));
}

/// Encodes a group whose largest magnitude is known. Returns its step.
template <PlaneKind kKind>
HWY_INLINE float encode_group(const GroupValues& group, VI largest, const Progression& numbers,
                              uint8_t* out) {
  const float step = step_of<kKind>(largest);
  if (HWY_UNLIKELY(!(step > 0))) {
    std::fill_n(out, kTileElements, uint8_t{0});
  } else {
    GroupEncoder<kKind>(group, step, numbers, out).all();
  }
  return step;
}

template <PlaneKind kKind>
float encode_plane(const Progression& numbers, const float* in, uint8_t* out) {
  GroupValues group;
  for (size_t i = 0; i < kTileElements; i += hn::Lanes(F32())) {
    VF value = hn::LoadU(F32(), in + i);
    if constexpr (kKind == PlaneKind::kVariance) value = hn::Sqrt(value);
    hn::Store(value, F32(), group.values + i);
  }
  return encode_group<kKind>(group, largest_of(group), numbers, out);
}

float encode_q8(PlaneKind kind, RoundingKey key, const float* in, uint8_t* out, size_t n) {
  if (n < kTileElements) return scalar_tiles().encode_q8(kind, key, in, out, n);
  return kind == PlaneKind::kVariance ? encode_plane<PlaneKind::kVariance>(key.variance, in, out)
                                      : encode_plane<PlaneKind::kMomentum>(key.momentum, in, out);
}

template <PlaneKind kKind>
void decode_group(float step, const uint8_t* in, float* out) {
  const VF steps = set(step);
  for (size_t word = 0; word < kCodeWords; word += hn::Lanes(F32())) {
    const VU words = hn::LoadU(U32(), reinterpret_cast<const uint32_t*>(in) + word);
    hn::StoreU(decode<kKind, 0>(words, steps), F32(), out + word);
    hn::StoreU(decode<kKind, 1>(words, steps), F32(), out + word + kCodeWords);
    hn::StoreU(decode<kKind, 2>(words, steps), F32(), out + word + 2 * kCodeWords);
    hn::StoreU(decode<kKind, 3>(words, steps), F32(), out + word + 3 * kCodeWords);
  }
}

void decode_q8(PlaneKind kind, float step, const uint8_t* in, float* out, size_t n) {
  if (n < kTileElements) {
    scalar_tiles().decode_q8(kind, step, in, out, n);
  } else if (kind == PlaneKind::kVariance) {
    decode_group<PlaneKind::kVariance>(step, in, out);
  } else {
    decode_group<PlaneKind::kMomentum>(step, in, out);
  }
}

// ---- all stages at once ----

template <DataType kGradient>
HWY_INLINE VF load_gradient(const void* gradient, size_t i) {
  if constexpr (kGradient == DataType::kF32) {
    return hn::LoadU(F32(), static_cast<const float*>(gradient) + i);
  } else if constexpr (kGradient == DataType::kBf16) {
    return load_bf16(static_cast<const uint16_t*>(gradient) + i);
  } else {
    return load_f16(static_cast<const uint16_t*>(gradient) + i);
  }
}

// How far ahead memory is asked for what an update reads and writes: the processor's own
// prefetching stops at each page's end.
constexpr size_t kAheadElements = 2048;
constexpr size_t kPrefetchElements = 64;  // at once: at least a line of every plane, in any format
static_assert(kTileElements % kPrefetchElements == 0);

// Of one plane, `width` bytes an element. Addresses beyond its end do no harm.
HWY_INLINE void prefetch(const void* plane, size_t element, size_t width) {
  constexpr size_t kLineBytes = 64;
  const auto* line = static_cast<const char*>(plane) + (element + kAheadElements) * width;
  for (size_t i = 0; i < kPrefetchElements * width; i += kLineBytes) hwy::Prefetch(line + i);
}

/// What all tiles of a call share. kGradient: the type of the gradients.
template <typename Rule, DataType kGradient>
class TileStep {
 public:
  TileStep(const StepScalars& s, const WholeTiles& tiles)
      : t_(tiles), rule_(s), scale_(gradient_scale(s)) {}

  /// Reads master weight and gradient of the elements from `i` on, applies the rule to them and to
  /// the momentum and variance in `e`, and writes the master weight. Where anything becomes NaN so
  /// does `nan_probe`; the caller makes it canonical.
  HWY_INLINE void vector(size_t i, StateVectors& e, VF& nan_probe) const {
    e.master = hn::LoadU(F32(), t_.master + i);
    if constexpr (Rule::kSquares) e.square = hn::LoadU(F32(), t_.squares + i);
    rule_.update(hn::Mul(load_gradient<kGradient>(t_.gradient, i), scale_), e);
    nan_probe = hn::Add(nan_probe, rule_.nan_probe(e));
    hn::StoreU(e.master, F32(), t_.master + i);
  }

  /// Asks for what elements kAheadElements after `i` need; `width`: bytes of a momentum.
  HWY_INLINE void prefetch_ahead(size_t i, size_t width) const {
    prefetch(t_.master, i, sizeof(float));
    prefetch(t_.gradient, i, base::data_type_bytes(kGradient));
    if constexpr (Rule::kMomentum) prefetch(t_.momentum, i, width);
    if constexpr (Rule::kVariance) prefetch(t_.variance, i, width);
    if (t_.weights != nullptr) prefetch(t_.weights, i, sizeof(uint16_t));
  }

  /// Weights out of elements whose master weights are done, and still in the first-level cache.
  HWY_INLINE void weights(size_t first, size_t count = kTileElements) const {
    const F32 f32;
    const size_t lanes = hn::Lanes(f32);
    const float* master = t_.master + first;
    if (t_.weights == nullptr) return;
    if (t_.weights_type != DataType::kBf16) {
      narrow(master,
             static_cast<std::byte*>(t_.weights) + first * base::data_type_bytes(t_.weights_type),
             t_.weights_type, count);
      return;
    }
    auto* out = static_cast<uint16_t*>(t_.weights) + first;
    for (size_t i = 0; i < count; i += 2 * lanes) {
      // Every NaN is canonical by now.
      store_upper_halves(round_bf16_nearest(hn::LoadU(f32, master + i)),
                         round_bf16_nearest(hn::LoadU(f32, master + i + lanes)), out + i);
    }
  }

 private:
  const WholeTiles t_;  // a copy, which stores through the planes cannot change
  const Rule rule_;
  const VF scale_;
};

template <typename Rule, DataType kGradient>
void update_whole_f32(const StepScalars& s, const WholeTiles& t) {
  const F32 f32;
  const TileStep<Rule, kGradient> step(s, t);
  auto* momentum = reinterpret_cast<float*>(t.momentum);
  auto* variance = reinterpret_cast<float*>(t.variance);
  for (size_t first = 0; first < t.count * kTileElements; first += kTileElements) {
    VF nan_probe = hn::Zero(f32);
    for (size_t i = first; i < first + kTileElements; i += hn::Lanes(f32)) {
      if (i % kPrefetchElements == 0) step.prefetch_ahead(i, sizeof(float));
      StateVectors e = zero_state();
      if constexpr (Rule::kMomentum) e.momentum = hn::LoadU(f32, momentum + i);
      if constexpr (Rule::kVariance) e.variance = hn::LoadU(f32, variance + i);
      step.vector(i, e, nan_probe);
      if constexpr (Rule::kMomentum) hn::StoreU(e.momentum, f32, momentum + i);
      if constexpr (Rule::kVariance) hn::StoreU(e.variance, f32, variance + i);
    }
    if (HWY_UNLIKELY(any_nan(nan_probe))) {
      canonicalize(t.master + first, kTileElements);
      if constexpr (Rule::kMomentum) canonicalize(momentum + first, kTileElements);
      if constexpr (Rule::kVariance) canonicalize(variance + first, kTileElements);
    }
    step.weights(first);
  }
}

template <typename Rule, DataType kGradient>
void update_whole_bf16(const StepScalars& s, const WholeTiles& t) {
  const size_t lanes = hn::Lanes(F32());
  const TileStep<Rule, kGradient> step(s, t);
  auto* momentum = reinterpret_cast<uint16_t*>(t.momentum);
  auto* variance = reinterpret_cast<uint16_t*>(t.variance);
  const auto load = [&](size_t i) {
    StateVectors e = zero_state();
    if constexpr (Rule::kMomentum) e.momentum = load_bf16(momentum + i);
    if constexpr (Rule::kVariance) e.variance = load_bf16(variance + i);
    return e;
  };
  const uint64_t step_seed = rounding_seed(s.seed, s.step);
  const size_t elements = t.count * kTileElements;
  for (size_t first = 0; first < elements; first += kTileElements) {
    const RoundingKey key = rounding_key(step_seed, t.element + first);
    RandomVectors momentum_random(key.momentum, lanes);
    RandomVectors variance_random(key.variance, lanes);
    for (size_t i = first; i < first + kTileElements; i += 2 * lanes) {
      if (i % kPrefetchElements == 0) step.prefetch_ahead(i, sizeof(uint16_t));
      StateVectors a = load(i);
      StateVectors b = load(i + lanes);
      VF nan_probe = hn::Zero(F32());
      step.vector(i, a, nan_probe);
      step.vector(i + lanes, b, nan_probe);
      if (HWY_UNLIKELY(any_nan(nan_probe))) {
        canonicalize(t.master + i, 2 * lanes);
        a.momentum = canonical_nan(a.momentum);
        b.momentum = canonical_nan(b.momentum);
        a.variance = canonical_nan(a.variance);
        b.variance = canonical_nan(b.variance);
      }
      if constexpr (Rule::kMomentum) {
        const VU lower = round_bf16_random(a.momentum, momentum_random.next());
        const VU upper = round_bf16_random(b.momentum, momentum_random.next());
        store_upper_halves(lower, upper, momentum + i);
      }
      if constexpr (Rule::kVariance) {
        const VU lower = round_bf16_random(a.variance, variance_random.next());
        const VU upper = round_bf16_random(b.variance, variance_random.next());
        store_upper_halves(lower, upper, variance + i);
      }
    }
    step.weights(first);
  }
}

/// Momenta and variances in q8. A tile's scales are known only after its last element, so its codes
/// and weights out are written while the next tile is updated: dividing and rooting of one hide the
/// encoding of the other.
template <typename Rule, DataType kGradient>
class Q8Tiles {
 public:
  Q8Tiles(const StepScalars& s, const WholeTiles& tiles)
      : t_(tiles), step_(s, tiles), step_seed_(rounding_seed(s.seed, s.step)) {}

  void run() {
    bool behind = false;  // whether the codes of the tile before are still to be written
    for (size_t tile = 0; tile < t_.count; ++tile) {
      behind = behind ? update<true>(tile) : update<false>(tile);
    }
    if (behind) {
      if constexpr (Rule::kMomentum) momentum_encoder_.all();
      if constexpr (Rule::kVariance) root_encoder_.all();
      step_.weights((t_.count - 1) * kTileElements);
    }
  }

 private:
  /// Returns whether the tile's codes and weights are left to the next.
  template <bool kBehind>
  HWY_INLINE bool update(size_t tile) {
    const size_t lanes = hn::Lanes(F32());
    const size_t first = tile * kTileElements;
    GroupValues& momenta = momenta_[tile % 2];
    GroupValues& roots = roots_[tile % 2];
    uint8_t* momentum_codes = nullptr;
    uint8_t* variance_codes = nullptr;
    VF momentum_step = hn::Zero(F32());
    VF variance_step = hn::Zero(F32());
    if constexpr (Rule::kMomentum) {
      momentum_codes = reinterpret_cast<uint8_t*>(t_.momentum) + first;
      momentum_step = set(t_.momentum_steps[tile]);
    }
    if constexpr (Rule::kVariance) {
      variance_codes = reinterpret_cast<uint8_t*>(t_.variance) + first;
      variance_step = set(t_.variance_steps[tile]);
    }
    auto momentum_encoder = momentum_encoder_;
    auto root_encoder = root_encoder_;
    VF nan_probe = hn::Zero(F32());
    VI momentum_largest = hn::Zero(I32());
    VI root_largest = hn::Zero(I32());
    for (size_t word = 0; word < kCodeWords; word += lanes) {
      if (4 * word % kPrefetchElements == 0)
        step_.prefetch_ahead(first + 4 * word, sizeof(uint8_t));
      VU momentum_words = hn::Zero(U32());
      VU variance_words = hn::Zero(U32());
      if constexpr (Rule::kMomentum) {
        momentum_words = hn::LoadU(U32(), reinterpret_cast<uint32_t*>(momentum_codes) + word);
      }
      if constexpr (Rule::kVariance) {
        variance_words = hn::LoadU(U32(), reinterpret_cast<uint32_t*>(variance_codes) + word);
      }
      const auto quarter = [&](auto byte) HWY_ATTR {
        const size_t lane = byte * kCodeWords + word;
        StateVectors e = zero_state();
        if constexpr (Rule::kMomentum) {
          e.momentum = decode<PlaneKind::kMomentum, byte>(momentum_words, momentum_step);
        }
        if constexpr (Rule::kVariance) {
          e.variance = decode<PlaneKind::kVariance, byte>(variance_words, variance_step);
        }
        step_.vector(first + lane, e, nan_probe);
        if constexpr (Rule::kMomentum) {
          hn::Store(e.momentum, F32(), momenta.values + lane);
          momentum_largest = larger_magnitude(momentum_largest, e.momentum);
        }
        if constexpr (Rule::kVariance) {
          hn::Store(e.root, F32(), roots.values + lane);
          root_largest = hn::Max(root_largest, hn::BitCast(I32(), e.root));
        }
      };
      quarter(std::integral_constant<int, 0>());
      quarter(std::integral_constant<int, 1>());
      if constexpr (kBehind && Rule::kMomentum) momentum_encoder.column(word);
      quarter(std::integral_constant<int, 2>());
      quarter(std::integral_constant<int, 3>());
      if constexpr (kBehind && Rule::kVariance) root_encoder.column(word);
      if constexpr (kBehind) step_.weights(first - kTileElements + 4 * word, 4 * lanes);
    }
    if constexpr (kBehind && Rule::kMomentum) momentum_encoder.finish();
    if constexpr (kBehind && Rule::kVariance) root_encoder.finish();
    if (HWY_UNLIKELY(any_nan(nan_probe))) {
      canonicalize(t_.master + first, kTileElements);
      if constexpr (Rule::kMomentum) momentum_largest = largest_of(momenta);
      if constexpr (Rule::kVariance) root_largest = largest_of(roots);
    }
    const RoundingKey key = rounding_key(step_seed_, t_.element + first);
    bool encodes = true;  // both planes
    if constexpr (Rule::kMomentum) {
      const float step = step_of<PlaneKind::kMomentum>(momentum_largest);
      t_.momentum_steps[tile] = step;
      momentum_encoder_ =
          GroupEncoder<PlaneKind::kMomentum>(momenta, step, key.momentum, momentum_codes);
      encodes = encodes && step > 0;
    }
    if constexpr (Rule::kVariance) {
      const float step = step_of<PlaneKind::kVariance>(root_largest);
      t_.variance_steps[tile] = step;
      root_encoder_ = GroupEncoder<PlaneKind::kVariance>(roots, step, key.variance, variance_codes);
      encodes = encodes && step > 0;
    }
    if (HWY_LIKELY(encodes)) return true;
    if constexpr (Rule::kMomentum) {
      encode_group<PlaneKind::kMomentum>(momenta, momentum_largest, key.momentum, momentum_codes);
    }
    if constexpr (Rule::kVariance) {
      encode_group<PlaneKind::kVariance>(roots, root_largest, key.variance, variance_codes);
    }
    step_.weights(first);
    return false;
  }

  const WholeTiles t_;
  const TileStep<Rule, kGradient> step_;
  const uint64_t step_seed_;
  GroupValues momenta_[2];  // by turns: of the tile at hand, and of the one before it
  GroupValues roots_[2];
  GroupEncoder<PlaneKind::kMomentum> momentum_encoder_;
  GroupEncoder<PlaneKind::kVariance> root_encoder_;
};

template <typename Rule, DataType kGradient>
void update_whole(base::StateFormat format, const StepScalars& s, const WholeTiles& t) {
  switch (format) {
    case base::StateFormat::kF32:
      update_whole_f32<Rule, kGradient>(s, t);
      return;
    case base::StateFormat::kBf16:
      update_whole_bf16<Rule, kGradient>(s, t);
      return;
    case base::StateFormat::kQ8:
      Q8Tiles<Rule, kGradient>(s, t).run();
      return;
  }
}

void update_whole_tiles(base::StateFormat format, const StepScalars& s, const WholeTiles& t) {
  with_rule(s, t.squares != nullptr, [&]<typename Rule>() {
    switch (t.gradient_type) {
      case DataType::kF32:
        update_whole<Rule, DataType::kF32>(format, s, t);
        return;
      case DataType::kBf16:
        update_whole<Rule, DataType::kBf16>(format, s, t);
        return;
      case DataType::kF16:
        update_whole<Rule, DataType::kF16>(format, s, t);
        return;
    }
  });
}

// ---- norm ----

void multiply(const float* in, float by, float* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  const VF factor = set(by);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(F32(), in + i), factor), F32(), out + i);
  }
  for (; i < n; ++i) out[i] = in[i] * by;
}

double leaf_squares(const void* in, DataType type, size_t n) {
  const F64 f64;
  const hn::Rebind<float, F64> narrow_f32;
  constexpr size_t kAccumulators = kNormLanes / hn::MaxLanes(f64);
  const size_t lanes = hn::Lanes(f64);
  alignas(64) float wide[kNormLeafElements];
  const float* values = static_cast<const float*>(in);
  if (type != DataType::kF32) {
    widen(in, type, wide, n);
    values = wide;
  }
  hn::Vec<F64> sums[kAccumulators];
  for (auto& sum : sums) sum = hn::Zero(f64);
  size_t i = 0;
  for (; i + kNormLanes <= n; i += kNormLanes) {
    for (size_t a = 0; a < kAccumulators; ++a) {
      const auto value = hn::PromoteTo(f64, hn::LoadU(narrow_f32, values + i + a * lanes));
      sums[a] = hn::Add(sums[a], hn::Mul(value, value));
    }
  }
  alignas(64) double by_lane[kNormLanes];
  for (size_t a = 0; a < kAccumulators; ++a) hn::Store(sums[a], f64, by_lane + a * lanes);
  for (size_t l = 0; i < n; ++i, ++l) {
    const double value = static_cast<double>(values[i]);
    by_lane[l] += value * value;
  }
  for (size_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) by_lane[l] += by_lane[l + half];
  }
  return by_lane[0];
}

SelectionKernels selection_kernels();  // selection_simd.cc
FeedbackKernels feedback_kernels();    // feedback_simd.cc
SignKernels sign_kernels();            // signs_simd.cc

TileKernels tiles() {
  return {.isa = hwy::TargetName(HWY_TARGET),
          .widen = widen,
          .narrow = narrow,
          .update = update,
          .update_whole_tiles = update_whole_tiles,
          .encode_bf16 = encode_bf16,
          .encode_q8 = encode_q8,
          .decode_q8 = decode_q8,
          .multiply = multiply,
          .leaf_squares = leaf_squares,
          .selection = selection_kernels(),
          .feedback = feedback_kernels(),
          .signs = sign_kernels()};
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace smartinf::kernels {

// Slowest first. A target that this build does not compile, or this processor lacks, is left out.
std::vector<TileKernels> simd_tiles() {
#if HWY_TARGETS == HWY_STATIC_TARGET
  const int64_t supported = HWY_TARGETS;  // nothing to ask the processor
#else
  const int64_t supported = hwy::SupportedTargets();
#endif
  std::vector<TileKernels> found;
#if HWY_TARGETS & HWY_NEON
  if ((supported & HWY_NEON) != 0) found.push_back(N_NEON::tiles());
#endif
#if HWY_TARGETS & HWY_SSE2
  if ((supported & HWY_SSE2) != 0) found.push_back(N_SSE2::tiles());
#endif
#if HWY_TARGETS & HWY_SSSE3
  if ((supported & HWY_SSSE3) != 0) found.push_back(N_SSSE3::tiles());
#endif
#if HWY_TARGETS & HWY_SSE4
  if ((supported & HWY_SSE4) != 0) found.push_back(N_SSE4::tiles());
#endif
#if HWY_TARGETS & HWY_AVX2
  if ((supported & HWY_AVX2) != 0) found.push_back(N_AVX2::tiles());
#endif
#if HWY_TARGETS & HWY_AVX3
  if ((supported & HWY_AVX3) != 0) found.push_back(N_AVX3::tiles());
#endif
  return found;
}

}  // namespace smartinf::kernels
#endif  // HWY_ONCE
