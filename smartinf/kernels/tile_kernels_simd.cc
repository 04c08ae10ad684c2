// Every tile stage as one Highway body, compiled once for each instruction set. The operations and
// their order are those of rules.h and state_codec.h, and no product is fused with a sum (but to
// make a quotient exact), so that all sets give the bits of the scalar truth. Elements that do not
// fill a vector go through the scalar truth itself.
#include "smartinf/kernels/tile_kernels_simd.h"

#include <algorithm>
#include <limits>

#include "smartinf/kernels/rules.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "smartinf/kernels/tile_kernels_simd.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
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
using I8 = hn::Rebind<int8_t, F32>;
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

HWY_INLINE VF load_f16(const uint16_t* in) {
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
}

HWY_INLINE void store_u16(VU value, uint16_t* out) {
  hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), value)), U16(), out);
}

HWY_INLINE void store_bf16(VF value, uint16_t* out) {
  const VU bits = bits_of(value);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), set_bits(1));
  const VU rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, set_bits(0x7fffu)), odd));
  const VU quiet = hn::Or(hn::ShiftRight<16>(bits), set_bits(0x0040u));
  store_u16(bits_of(hn::IfThenElse(hn::IsNaN(value), float_of(quiet), float_of(rounded))), out);
}

HWY_INLINE void store_f16(VF value, uint16_t* out) {
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
  store_u16(hn::Or(bits_of(half), sign), out);
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
};

HWY_INLINE VF add_decay(const StepScalars& s, VF gradient, VF master) {
  if (s.weight_decay == 0) return gradient;
  return hn::Add(gradient, hn::Mul(set(s.weight_decay), master));
}

HWY_INLINE VF lerp_vector(VF a, VF b, float weight) {
  const VF difference = hn::Sub(b, a);
  if (weight < 0.5f) return hn::Add(a, hn::Mul(set(weight), difference));
  return hn::Add(b, hn::Mul(set(weight - 1.0f), difference));
}

// root / divisor with IEEE rounding, without the divider where there is FMA. `reciprocal` is the
// rounded 1 / divisor; each correction adds the exact remainder times it, and after the first the
// quotient is off by less than one unit, from where the second rounds correctly (Markstein 1990).
// For roots of f32 and divisors in [2^-12, 1]: nothing on the way underflows or overflows.
HWY_INLINE VF divide_root(VF root, float divisor, float reciprocal) {
#if HWY_NATIVE_FMA
  if (divisor >= 0x1p-12f) {
    const VF d = set(divisor);
    const VF r = set(reciprocal);
    VF quotient = hn::Mul(root, r);
    quotient = hn::MulAdd(hn::NegMulAdd(quotient, d, root), r, quotient);
    quotient = hn::MulAdd(hn::NegMulAdd(quotient, d, root), r, quotient);
    // An infinity has no remainder.
    return hn::IfThenElse(hn::Lt(root, set(std::numeric_limits<float>::infinity())), quotient,
                          root);
  }
#endif
  (void)reciprocal;
  return hn::Div(root, set(divisor));
}

struct Adam {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = true;
  static HWY_INLINE void update(const StepScalars& s, VF gradient, StateVectors& e) {
    e.master = hn::Mul(e.master, set(s.decay_factor));
    gradient = add_decay(s, gradient, e.master);
    e.momentum = lerp_vector(e.momentum, gradient, s.one_minus_beta1);
    e.variance = hn::Add(hn::Mul(e.variance, set(s.beta2)),
                         hn::Mul(hn::Mul(set(s.one_minus_beta2), gradient), gradient));
    const VF denominator =
        hn::Add(divide_root(hn::Sqrt(e.variance), s.bias2_sqrt, 1.0f / s.bias2_sqrt), set(s.eps));
    e.master = hn::Add(e.master, hn::Div(hn::Mul(set(-s.step_size), e.momentum), denominator));
  }
};

struct Sgd {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = false;
  static HWY_INLINE void update(const StepScalars& s, VF gradient, StateVectors& e) {
    gradient = add_decay(s, gradient, e.master);
    if (s.first_step || s.beta1 == 0) {
      e.momentum = gradient;
    } else {
      e.momentum =
          hn::Add(hn::Mul(e.momentum, set(s.beta1)), hn::Mul(set(s.dampening_factor), gradient));
    }
    const VF direction =
        s.nesterov ? hn::Add(gradient, hn::Mul(set(s.beta1), e.momentum)) : e.momentum;
    e.master = hn::Add(e.master, hn::Mul(set(-s.lr), direction));
  }
};

struct Adagrad {
  static constexpr bool kMomentum = false;
  static constexpr bool kVariance = true;
  static HWY_INLINE void update(const StepScalars& s, VF gradient, StateVectors& e) {
    gradient = add_decay(s, gradient, e.master);
    const VF sum = s.first_step ? set(s.initial_variance) : e.variance;
    e.variance = hn::Add(sum, hn::Mul(gradient, gradient));
    e.master = hn::Add(e.master, hn::Div(hn::Mul(set(-s.step_size), gradient),
                                         hn::Add(hn::Sqrt(e.variance), set(s.eps))));
  }
};

struct Lion {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = false;
  static HWY_INLINE void update(const StepScalars& s, VF gradient, StateVectors& e) {
    e.master = hn::Mul(e.master, set(s.decay_factor));
    const VF direction =
        hn::Add(hn::Mul(e.momentum, set(s.beta1)), hn::Mul(gradient, set(s.one_minus_beta1)));
    const VF zero = hn::Zero(F32());
    const VF down = hn::Add(e.master, set(-s.lr));
    const VF up = hn::Add(e.master, set(s.lr));
    e.master = hn::IfThenElse(hn::Gt(direction, zero), down, e.master);
    e.master = hn::IfThenElse(hn::Lt(direction, zero), up, e.master);
    e.master = hn::IfThenElse(hn::IsNaN(direction), direction, e.master);
    e.momentum =
        hn::Add(hn::Mul(e.momentum, set(s.beta2)), hn::Mul(gradient, set(s.one_minus_beta2)));
  }
};

template <typename Rule>
void update_rule(const StepScalars& s, const float* gradient, float* master, float* momentum,
                 float* variance, size_t n) {
  const F32 f32;
  const size_t lanes = hn::Lanes(f32);
  const VF scale = set(s.maximize ? -s.gradient_scale : s.gradient_scale);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    StateVectors e{
        .master = hn::LoadU(f32, master + i), .momentum = hn::Zero(f32), .variance = hn::Zero(f32)};
    if constexpr (Rule::kMomentum) e.momentum = hn::LoadU(f32, momentum + i);
    if constexpr (Rule::kVariance) e.variance = hn::LoadU(f32, variance + i);
    Rule::update(s, hn::Mul(hn::LoadU(f32, gradient + i), scale), e);
    hn::StoreU(canonical_nan(e.master), f32, master + i);
    if constexpr (Rule::kMomentum) hn::StoreU(canonical_nan(e.momentum), f32, momentum + i);
    if constexpr (Rule::kVariance) hn::StoreU(canonical_nan(e.variance), f32, variance + i);
  }
  if (i < n) {
    scalar_tiles().update(s, gradient + i, master + i, Rule::kMomentum ? momentum + i : nullptr,
                          Rule::kVariance ? variance + i : nullptr, n - i);
  }
}

void update(const StepScalars& scalars, const float* gradient, float* master, float* momentum,
            float* variance, size_t n) {
  switch (scalars.rule) {
    case UpdateRule::kAdamW:
    case UpdateRule::kAdam:
      update_rule<Adam>(scalars, gradient, master, momentum, variance, n);
      return;
    case UpdateRule::kSgdMomentum:
      update_rule<Sgd>(scalars, gradient, master, momentum, variance, n);
      return;
    case UpdateRule::kAdagrad:
      update_rule<Adagrad>(scalars, gradient, master, momentum, variance, n);
      return;
    case UpdateRule::kLion:
      update_rule<Lion>(scalars, gradient, master, momentum, variance, n);
      return;
  }
}

// ---- state codecs ----

// lane * kLaneFactor for the lanes of a tile.
struct LaneProducts {
  alignas(64) uint32_t values[kTileElements];
};
constexpr LaneProducts make_lane_products() {
  LaneProducts products{};
  for (uint32_t lane = 0; lane < kTileElements; ++lane) products.values[lane] = lane * kLaneFactor;
  return products;
}
inline constexpr LaneProducts kLaneProducts = make_lane_products();

// rounding_bits() for the lanes from `first` on, a multiple of the vector's length.
HWY_INLINE VU random_bits(RoundingKey key, size_t first) {
  VU x = hn::Xor(hn::Load(U32(), kLaneProducts.values + first), set_bits(key.low));
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  x = hn::Xor(hn::Mul(x, set_bits(kMixFactor1)), set_bits(key.high));
  x = hn::Xor(x, hn::ShiftRight<15>(x));
  x = hn::Mul(x, set_bits(kMixFactor2));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// rounding_half() in the low bits, zeros above.
template <PlaneKind kKind>
HWY_INLINE VU random_half(VU bits) {
  return kKind == PlaneKind::kVariance ? hn::ShiftRight<16>(bits)
                                       : hn::And(bits, set_bits(0xffffu));
}

// unit_interval() of rounding_half(): its 16 bits and a one below them become the upper part of the
// mantissa of a number in [1, 2).
template <PlaneKind kKind>
HWY_INLINE VF random_unit(VU bits) {
  const VU placed =
      kKind == PlaneKind::kVariance ? hn::ShiftRight<9>(bits) : hn::ShiftLeft<7>(bits);
  const VU number = hn::Or(hn::And(placed, set_bits(0x007fff80u)), set_bits(0x3f800040u));
  return hn::Sub(float_of(number), set(1.0f));
}

HWY_INLINE void store_bf16_rounded(VF value, VU random16, uint16_t* out) {
  const VF rounded = float_of(hn::Add(bits_of(value), random16));
  const VF nan = float_of(set_bits(kCanonicalNan));
  store_u16(hn::ShiftRight<16>(bits_of(hn::IfThenElse(hn::IsNaN(value), nan, rounded))), out);
}

template <PlaneKind kKind>
void encode_bf16_plane(RoundingKey key, const float* in, uint16_t* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    store_bf16_rounded(hn::LoadU(F32(), in + i), random_half<kKind>(random_bits(key, i)), out + i);
  }
  for (; i < n; ++i) {
    out[i] = round_bf16(in[i], rounding_half(rounding_bits(key, static_cast<uint32_t>(i)), kKind));
  }
}

void encode_bf16(PlaneKind kind, RoundingKey key, const float* in, uint16_t* out, size_t n) {
  if (kind == PlaneKind::kVariance) {
    encode_bf16_plane<PlaneKind::kVariance>(key, in, out, n);
  } else {
    encode_bf16_plane<PlaneKind::kMomentum>(key, in, out, n);
  }
}

// First guesses for floor_root() and floor_fourth_root(), right or one too small for codes up to
// 255. x86 has a reciprocal root of 12 bits, several times faster than the exact one; NEON's of 8
// would not do.
HWY_INLINE VF root(VF y) {
#if HWY_ARCH_X86
  return hn::Mul(y, hn::ApproximateReciprocalSqrt(hn::Max(y, set(0x1p-60f))));
#else
  return hn::Sqrt(y);
#endif
}
HWY_INLINE VF fourth_root(VF y) {
#if HWY_ARCH_X86
  return hn::ApproximateReciprocalSqrt(hn::ApproximateReciprocalSqrt(hn::Max(y, set(0x1p-100f))));
#else
  return hn::Sqrt(hn::Sqrt(y));
#endif
}
constexpr float kRoundToWhole = 0x1.8p23f;  // adding it leaves no room for a fraction
HWY_INLINE VF guess_floor(VF root_of_y) {
  // An error of the root up to 0.2 neither reaches the next code nor the one but last.
  return hn::Sub(hn::Add(hn::Sub(root_of_y, set(0.7f)), set(kRoundToWhole)), set(kRoundToWhole));
}

HWY_INLINE VF squared(VF value) { return hn::Mul(value, value); }

template <PlaneKind kKind>
HWY_INLINE void store_codes(VF value, VF inverse, VU bits, uint8_t* out) {
  const VF one = set(1.0f);
  const VF magnitude = hn::Abs(value);
  VF code;
  if constexpr (kKind == PlaneKind::kVariance) {
    const VF y = hn::Min(hn::Mul(hn::Mul(magnitude, inverse), inverse), set(kVarianceCodesFourth));
    VF lower = guess_floor(fourth_root(y));
    const VF above = hn::Add(lower, one);
    lower = hn::IfThenElse(hn::Le(squared(squared(above)), y), above, lower);
    const VF square = squared(lower);
    const VF side = hn::Add(hn::Add(lower, lower), one);
    const VF gap = hn::Mul(side, hn::Add(hn::Add(square, square), side));
    const auto up = hn::Lt(hn::Mul(random_unit<kKind>(bits), gap), hn::Sub(y, squared(square)));
    code = hn::IfThenElse(up, hn::Add(lower, one), lower);
    // Only zero has code 0.
    code = hn::Max(code, hn::IfThenElseZero(hn::Ne(value, hn::Zero(F32())), one));
  } else {
    const VF y = hn::Min(hn::Mul(magnitude, inverse), set(kMomentumCodesSquared));
    VF lower = guess_floor(root(y));
    const VF above = hn::Add(lower, one);
    lower = hn::IfThenElse(hn::Le(squared(above), y), above, lower);
    const VF gap = hn::Add(hn::Add(lower, lower), one);
    const auto up = hn::Lt(hn::Mul(random_unit<kKind>(bits), gap), hn::Sub(y, squared(lower)));
    code = hn::CopySign(hn::IfThenElse(up, hn::Add(lower, one), lower), value);
  }
  // The low byte of the shifted number is the code, in two's complement.
  hn::StoreU(hn::TruncateTo(U8(), bits_of(hn::Add(code, set(kRoundToWhole)))), U8(), out);
}

template <PlaneKind kKind>
HWY_INLINE VF load_codes(const uint8_t* in, VF step) {
  if constexpr (kKind == PlaneKind::kVariance) {
    const VF code = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::LoadU(U8(), in)));
    return squared(hn::Mul(squared(code), step));
  } else {
    const auto signed_codes = hn::LoadU(I8(), reinterpret_cast<const int8_t*>(in));
    const VF code = hn::ConvertTo(F32(), hn::PromoteTo(I32(), signed_codes));
    return hn::Mul(hn::Mul(code, hn::Abs(code)), step);
  }
}

template <PlaneKind kKind>
float encode_q8_plane(RoundingKey key, const float* in, uint8_t* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  VI largest_lanes = hn::Zero(I32());
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    largest_lanes = hn::Max(largest_lanes, hn::BitCast(I32(), hn::Abs(hn::LoadU(F32(), in + i))));
  }
  auto largest = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(I32(), largest_lanes)));
  for (; i < n; ++i) {
    largest = HWY_MAX(largest, std::bit_cast<uint32_t>(in[i]) & kMagnitudeMask);
  }

  const float step = group_step(kKind, largest);
  const float inverse = group_inverse(step);
  if (inverse == 0) {
    std::fill(out, out + n, uint8_t{0});
    return step;
  }
  for (i = 0; i + lanes <= n; i += lanes) {
    store_codes<kKind>(hn::LoadU(F32(), in + i), set(inverse), random_bits(key, i), out + i);
  }
  for (; i < n; ++i) {
    const uint32_t random16 = rounding_half(rounding_bits(key, static_cast<uint32_t>(i)), kKind);
    out[i] = kKind == PlaneKind::kVariance
                 ? encode_variance(in[i], inverse, random16)
                 : static_cast<uint8_t>(encode_momentum(in[i], inverse, random16));
  }
  return step;
}

float encode_q8(PlaneKind kind, RoundingKey key, const float* in, uint8_t* out, size_t n) {
  return kind == PlaneKind::kVariance ? encode_q8_plane<PlaneKind::kVariance>(key, in, out, n)
                                      : encode_q8_plane<PlaneKind::kMomentum>(key, in, out, n);
}

template <PlaneKind kKind>
void decode_q8_plane(float step, const uint8_t* in, float* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(load_codes<kKind>(in + i, set(step)), F32(), out + i);
  }
  if (i < n) scalar_tiles().decode_q8(kKind, step, in + i, out + i, n - i);
}

void decode_q8(PlaneKind kind, float step, const uint8_t* in, float* out, size_t n) {
  if (kind == PlaneKind::kVariance) {
    decode_q8_plane<PlaneKind::kVariance>(step, in, out, n);
  } else {
    decode_q8_plane<PlaneKind::kMomentum>(step, in, out, n);
  }
}

// ---- all stages at once ----

HWY_INLINE VF load_gradient(const void* gradient, DataType type, size_t i) {
  switch (type) {
    case DataType::kF32:
      return hn::LoadU(F32(), static_cast<const float*>(gradient) + i);
    case DataType::kBf16:
      return load_bf16(static_cast<const uint16_t*>(gradient) + i);
    case DataType::kF16:
      return load_f16(static_cast<const uint16_t*>(gradient) + i);
  }
  return hn::Zero(F32());
}

HWY_INLINE void store_weights(VF master, void* weights, DataType type, size_t i) {
  if (weights == nullptr) return;
  switch (type) {
    case DataType::kF32:
      hn::StoreU(master, F32(), static_cast<float*>(weights) + i);
      return;
    case DataType::kBf16:
      store_bf16(master, static_cast<uint16_t*>(weights) + i);
      return;
    case DataType::kF16:
      store_f16(master, static_cast<uint16_t*>(weights) + i);
      return;
  }
}

/// A q8 tile's new values, waiting for the largest of them to be known.
struct WaitingTile {
  alignas(64) float momentum[kTileElements] = {};
  alignas(64) float variance[kTileElements] = {};
  RoundingKey key;
  float momentum_inverse = 0;
  float variance_inverse = 0;
  uint8_t* momentum_codes = nullptr;
  uint8_t* variance_codes = nullptr;
};

template <typename Rule>
HWY_INLINE void encode_waiting(const WaitingTile& tile, size_t i) {
  const VU bits = random_bits(tile.key, i);
  if constexpr (Rule::kMomentum) {
    store_codes<PlaneKind::kMomentum>(hn::Load(F32(), tile.momentum + i),
                                      set(tile.momentum_inverse), bits, tile.momentum_codes + i);
  }
  if constexpr (Rule::kVariance) {
    store_codes<PlaneKind::kVariance>(hn::Load(F32(), tile.variance + i),
                                      set(tile.variance_inverse), bits, tile.variance_codes + i);
  }
}

// Groups without a finite inverse have zero codes, whatever encode_waiting() made of them.
template <typename Rule>
HWY_INLINE void finish_waiting(const WaitingTile& tile) {
  if (Rule::kMomentum && tile.momentum_inverse == 0) {
    std::fill_n(tile.momentum_codes, kTileElements, uint8_t{0});
  }
  if (Rule::kVariance && tile.variance_inverse == 0) {
    std::fill_n(tile.variance_codes, kTileElements, uint8_t{0});
  }
}

// q8 codes of a tile are written while the next one is computed: the divisions and roots of the one
// and the many small operations of the other use different parts of the processor.
template <typename Rule, base::StateFormat kFormat>
void update_whole(const StepScalars& scalars, const WholeTiles& tiles) {
  using base::StateFormat;
  const StepScalars s = scalars;  // copies, which stores through the planes cannot change
  const WholeTiles t = tiles;
  const F32 f32;
  const size_t lanes = hn::Lanes(f32);
  const VF scale = set(s.maximize ? -s.gradient_scale : s.gradient_scale);
  WaitingTile waiting[2];
  alignas(64) uint8_t nowhere[kTileElements];  // where codes go before there are any
  waiting[1].momentum_codes = nowhere;
  waiting[1].variance_codes = nowhere;
  for (size_t tile = 0; tile < t.count; ++tile) {
    const size_t base_index = tile * kTileElements;
    WaitingTile& now = waiting[tile % 2];
    const WaitingTile& before = waiting[(tile + 1) % 2];
    RoundingKey key;
    VF momentum_step = set(0.0f);
    VF variance_step = set(0.0f);
    VI momentum_largest = hn::Zero(I32());
    VI variance_largest = hn::Zero(I32());
    if constexpr (kFormat != StateFormat::kF32) {
      key = rounding_key(s.seed, s.step, t.element + base_index);
    }
    if constexpr (kFormat == StateFormat::kQ8) {
      if constexpr (Rule::kMomentum) momentum_step = set(t.momentum_steps[tile]);
      if constexpr (Rule::kVariance) variance_step = set(t.variance_steps[tile]);
    }
    for (size_t lane = 0; lane < kTileElements; lane += lanes) {
      const size_t i = base_index + lane;
      StateVectors e{.master = hn::LoadU(f32, t.master + i),
                     .momentum = hn::Zero(f32),
                     .variance = hn::Zero(f32)};
      auto* momentum_f32 = reinterpret_cast<float*>(t.momentum);
      auto* variance_f32 = reinterpret_cast<float*>(t.variance);
      auto* momentum_bf16 = reinterpret_cast<uint16_t*>(t.momentum);
      auto* variance_bf16 = reinterpret_cast<uint16_t*>(t.variance);
      auto* momentum_q8 = reinterpret_cast<uint8_t*>(t.momentum);
      auto* variance_q8 = reinterpret_cast<uint8_t*>(t.variance);
      if constexpr (kFormat == StateFormat::kF32) {
        if constexpr (Rule::kMomentum) e.momentum = hn::LoadU(f32, momentum_f32 + i);
        if constexpr (Rule::kVariance) e.variance = hn::LoadU(f32, variance_f32 + i);
      } else if constexpr (kFormat == StateFormat::kBf16) {
        if constexpr (Rule::kMomentum) e.momentum = load_bf16(momentum_bf16 + i);
        if constexpr (Rule::kVariance) e.variance = load_bf16(variance_bf16 + i);
      } else {
        if constexpr (Rule::kMomentum) {
          e.momentum = load_codes<PlaneKind::kMomentum>(momentum_q8 + i, momentum_step);
        }
        if constexpr (Rule::kVariance) {
          e.variance = load_codes<PlaneKind::kVariance>(variance_q8 + i, variance_step);
        }
      }

      Rule::update(s, hn::Mul(load_gradient(t.gradient, t.gradient_type, i), scale), e);
      e.master = canonical_nan(e.master);
      hn::StoreU(e.master, f32, t.master + i);
      store_weights(e.master, t.weights, t.weights_type, i);

      if constexpr (kFormat == StateFormat::kF32) {
        if constexpr (Rule::kMomentum) {
          hn::StoreU(canonical_nan(e.momentum), f32, momentum_f32 + i);
        }
        if constexpr (Rule::kVariance) {
          hn::StoreU(canonical_nan(e.variance), f32, variance_f32 + i);
        }
      } else if constexpr (kFormat == StateFormat::kBf16) {
        const VU bits = random_bits(key, lane);
        if constexpr (Rule::kMomentum) {
          store_bf16_rounded(e.momentum, random_half<PlaneKind::kMomentum>(bits),
                             momentum_bf16 + i);
        }
        if constexpr (Rule::kVariance) {
          store_bf16_rounded(e.variance, random_half<PlaneKind::kVariance>(bits),
                             variance_bf16 + i);
        }
      } else {
        if constexpr (Rule::kMomentum) {
          hn::Store(e.momentum, f32, now.momentum + lane);
          momentum_largest = hn::Max(momentum_largest, hn::BitCast(I32(), hn::Abs(e.momentum)));
        }
        if constexpr (Rule::kVariance) {
          hn::Store(e.variance, f32, now.variance + lane);
          variance_largest = hn::Max(variance_largest, hn::BitCast(I32(), hn::Abs(e.variance)));
        }
        encode_waiting<Rule>(before, lane);
      }
    }
    if constexpr (kFormat == StateFormat::kQ8) {
      finish_waiting<Rule>(before);
      now.key = key;
      if constexpr (Rule::kMomentum) {
        const auto largest = hn::GetLane(hn::MaxOfLanes(I32(), momentum_largest));
        const float step = group_step(PlaneKind::kMomentum, static_cast<uint32_t>(largest));
        t.momentum_steps[tile] = step;
        now.momentum_inverse = group_inverse(step);
        now.momentum_codes = reinterpret_cast<uint8_t*>(t.momentum) + base_index;
      }
      if constexpr (Rule::kVariance) {
        const auto largest = hn::GetLane(hn::MaxOfLanes(I32(), variance_largest));
        const float step = group_step(PlaneKind::kVariance, static_cast<uint32_t>(largest));
        t.variance_steps[tile] = step;
        now.variance_inverse = group_inverse(step);
        now.variance_codes = reinterpret_cast<uint8_t*>(t.variance) + base_index;
      }
    }
  }
  if constexpr (kFormat == StateFormat::kQ8) {
    if (t.count == 0) return;
    const WaitingTile& last = waiting[(t.count - 1) % 2];
    for (size_t lane = 0; lane < kTileElements; lane += lanes) encode_waiting<Rule>(last, lane);
    finish_waiting<Rule>(last);
  }
}

template <base::StateFormat kFormat>
void update_whole_format(const StepScalars& s, const WholeTiles& t) {
  switch (s.rule) {
    case UpdateRule::kAdamW:
    case UpdateRule::kAdam:
      update_whole<Adam, kFormat>(s, t);
      return;
    case UpdateRule::kSgdMomentum:
      update_whole<Sgd, kFormat>(s, t);
      return;
    case UpdateRule::kAdagrad:
      update_whole<Adagrad, kFormat>(s, t);
      return;
    case UpdateRule::kLion:
      update_whole<Lion, kFormat>(s, t);
      return;
  }
}

void update_whole_tiles(base::StateFormat format, const StepScalars& s, const WholeTiles& t) {
  switch (format) {
    case base::StateFormat::kF32:
      update_whole_format<base::StateFormat::kF32>(s, t);
      return;
    case base::StateFormat::kBf16:
      update_whole_format<base::StateFormat::kBf16>(s, t);
      return;
    case base::StateFormat::kQ8:
      update_whole_format<base::StateFormat::kQ8>(s, t);
      return;
  }
}

// ---- norm ----

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

TileKernels tiles() {
  return {.isa = hwy::TargetName(HWY_TARGET),
          .widen = widen,
          .narrow = narrow,
          .update = update,
          .update_whole_tiles = update_whole_tiles,
          .encode_bf16 = encode_bf16,
          .encode_q8 = encode_q8,
          .decode_q8 = decode_q8,
          .leaf_squares = leaf_squares,
          .selection = selection_kernels()};
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace smartinf::kernels {

// Slowest first. A target that this build does not compile, or this processor lacks, is left out.
std::vector<TileKernels> simd_tiles() {
  const int64_t supported = hwy::SupportedTargets();
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
