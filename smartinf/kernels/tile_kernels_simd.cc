// Every tile stage as one Highway body, compiled once for each instruction set. The operations and
// their order are those of rules.h and state_codec.h; no MulAdd anywhere, so that all sets give the
// bits of the scalar truth. Elements that do not fill a vector go through the scalar truth itself.
#include "smartinf/kernels/tile_kernels_simd.h"

#include <cmath>

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

struct Adam {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = true;
  static HWY_INLINE void update(const StepScalars& s, VF gradient, StateVectors& e) {
    e.master = hn::Mul(e.master, set(s.decay_factor));
    gradient = add_decay(s, gradient, e.master);
    e.momentum = lerp_vector(e.momentum, gradient, s.one_minus_beta1);
    e.variance = hn::Add(hn::Mul(e.variance, set(s.beta2)),
                         hn::Mul(hn::Mul(set(s.one_minus_beta2), gradient), gradient));
    const VF denominator = hn::Add(hn::Div(hn::Sqrt(e.variance), set(s.bias2_sqrt)), set(s.eps));
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

// rounding_bits() for the lanes from `first` on.
HWY_INLINE VU random_bits(RoundingKey key, size_t first) {
  const VU lane = hn::Iota(U32(), static_cast<uint32_t>(first));
  VU x = hn::Xor(hn::Mul(lane, set_bits(kLaneFactor)), set_bits(key.low));
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  x = hn::Xor(hn::Mul(x, set_bits(kMixFactor1)), set_bits(key.high));
  x = hn::Xor(x, hn::ShiftRight<15>(x));
  x = hn::Mul(x, set_bits(kMixFactor2));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

template <PlaneKind kKind>
HWY_INLINE VU random_half(RoundingKey key, size_t first) {
  const VU bits = random_bits(key, first);
  return kKind == PlaneKind::kVariance ? hn::ShiftRight<16>(bits)
                                       : hn::And(bits, set_bits(0xffffu));
}

template <PlaneKind kKind>
void encode_bf16_plane(RoundingKey key, const float* in, uint16_t* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF value = hn::LoadU(F32(), in + i);
    const VU rounded = hn::Add(bits_of(value), random_half<kKind>(key, i));
    store_u16(hn::ShiftRight<16>(bits_of(hn::IfThenElse(
                  hn::IsNaN(value), float_of(set_bits(kCanonicalNan)), float_of(rounded)))),
              out + i);
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

HWY_INLINE VF unit_interval_vector(VU random16) {
  const VU odd = hn::Add(hn::Add(random16, random16), set_bits(1));
  return hn::Mul(hn::ConvertTo(F32(), hn::BitCast(I32(), odd)), set(0x1p-17f));
}

// Codes are at most 255, so rounding through an integer is floor.
HWY_INLINE VF floor_of(VF value) { return hn::ConvertTo(F32(), hn::ConvertTo(I32(), value)); }

HWY_INLINE VI momentum_codes(VF value, VF inverse, VU random16) {
  const VF y = hn::Min(hn::Mul(hn::Abs(value), inverse), set(kMomentumCodesSquared));
  const VF lower = floor_of(hn::Sqrt(y));
  const VF gap = hn::Add(hn::Mul(set(2.0f), lower), set(1.0f));
  const auto up =
      hn::Lt(hn::Mul(unit_interval_vector(random16), gap), hn::Sub(y, hn::Mul(lower, lower)));
  const VF code = hn::IfThenElse(up, hn::Add(lower, set(1.0f)), lower);
  return hn::ConvertTo(I32(), hn::CopySign(code, value));
}

HWY_INLINE VI variance_codes(VF deviation, VF inverse, VU random16) {
  const VF y = hn::Min(hn::Mul(deviation, inverse), set(kVarianceCodesSquared));
  const VF lower = floor_of(hn::Sqrt(y));
  const VF square = hn::Mul(lower, lower);
  const VF side = hn::Add(hn::Mul(set(2.0f), lower), set(1.0f));
  const VF gap = hn::Mul(side, hn::Add(hn::Mul(set(2.0f), square), side));
  const auto up = hn::Lt(hn::Mul(unit_interval_vector(random16), gap),
                         hn::Mul(hn::Sub(y, square), hn::Add(y, square)));
  const VF code = hn::IfThenElse(up, hn::Add(lower, set(1.0f)), lower);
  const VF zero = hn::Zero(F32());
  const VF least = hn::IfThenElse(hn::Gt(y, zero), set(1.0f), zero);
  return hn::ConvertTo(I32(), hn::Max(code, least));
}

template <PlaneKind kKind>
float encode_q8_plane(RoundingKey key, const float* in, uint8_t* out, size_t n) {
  constexpr bool kIsVariance = kKind == PlaneKind::kVariance;
  const F32 f32;
  const I32 i32;
  const size_t lanes = hn::Lanes(f32);
  alignas(64) float deviations[kTileElements];
  const float* values = kIsVariance ? deviations : in;

  VI largest_lanes = hn::Zero(i32);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    VF value = hn::LoadU(f32, in + i);
    if constexpr (kIsVariance) {
      value = hn::Sqrt(value);
      hn::StoreU(value, f32, deviations + i);
    }
    largest_lanes = hn::Max(largest_lanes, hn::BitCast(i32, hn::Abs(value)));
  }
  auto largest = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(i32, largest_lanes)));
  for (; i < n; ++i) {
    const float value = kIsVariance ? std::sqrt(in[i]) : in[i];
    if constexpr (kIsVariance) deviations[i] = value;
    largest = HWY_MAX(largest, std::bit_cast<uint32_t>(value) & kMagnitudeMask);
  }

  const float step =
      group_step(largest, kIsVariance ? kVarianceCodesSquared : kMomentumCodesSquared);
  const float inverse = group_inverse(step);
  i = 0;
  if (inverse != 0) {
    const VF inverse_lanes = set(inverse);
    for (; i + lanes <= n; i += lanes) {
      const VF value = hn::LoadU(f32, values + i);
      const VU random16 = random_half<kKind>(key, i);
      if constexpr (kIsVariance) {
        hn::StoreU(hn::DemoteTo(U8(), variance_codes(value, inverse_lanes, random16)), U8(),
                   out + i);
      } else {
        hn::StoreU(hn::DemoteTo(I8(), momentum_codes(value, inverse_lanes, random16)), I8(),
                   reinterpret_cast<int8_t*>(out) + i);
      }
    }
  }
  for (; i < n; ++i) {
    const uint32_t random16 = rounding_half(rounding_bits(key, static_cast<uint32_t>(i)), kKind);
    out[i] = kIsVariance ? encode_variance(values[i], inverse, random16)
                         : static_cast<uint8_t>(encode_momentum(values[i], inverse, random16));
  }
  return step;
}

float encode_q8(PlaneKind kind, RoundingKey key, const float* in, uint8_t* out, size_t n) {
  return kind == PlaneKind::kVariance ? encode_q8_plane<PlaneKind::kVariance>(key, in, out, n)
                                      : encode_q8_plane<PlaneKind::kMomentum>(key, in, out, n);
}

void decode_q8(PlaneKind kind, float step, const uint8_t* in, float* out, size_t n) {
  const F32 f32;
  const I32 i32;
  const size_t lanes = hn::Lanes(f32);
  const VF step_lanes = set(step);
  size_t i = 0;
  if (kind == PlaneKind::kVariance) {
    for (; i + lanes <= n; i += lanes) {
      const VF code = hn::ConvertTo(f32, hn::PromoteTo(i32, hn::LoadU(U8(), in + i)));
      const VF deviation = hn::Mul(hn::Mul(code, code), step_lanes);
      hn::StoreU(hn::Mul(deviation, deviation), f32, out + i);
    }
  } else {
    const auto* codes = reinterpret_cast<const int8_t*>(in);
    for (; i + lanes <= n; i += lanes) {
      const VF code = hn::ConvertTo(f32, hn::PromoteTo(i32, hn::LoadU(I8(), codes + i)));
      hn::StoreU(hn::Mul(hn::Mul(code, hn::Abs(code)), step_lanes), f32, out + i);
    }
  }
  if (i < n) scalar_tiles().decode_q8(kind, step, in + i, out + i, n - i);
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

TileKernels tiles() {
  return {.isa = hwy::TargetName(HWY_TARGET),
          .widen = widen,
          .narrow = narrow,
          .update = update,
          .encode_bf16 = encode_bf16,
          .encode_q8 = encode_q8,
          .decode_q8 = decode_q8,
          .leaf_squares = leaf_squares};
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
