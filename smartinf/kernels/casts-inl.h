// The vector types of the tile stages, and casts between f32, bf16 and f16.
// Part of tile_kernels_simd.cc, which includes it once for every instruction set.
#if defined(SMARTINF_KERNELS_CASTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SMARTINF_KERNELS_CASTS_INL_H_
#undef SMARTINF_KERNELS_CASTS_INL_H_
#else
#define SMARTINF_KERNELS_CASTS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include <hwy/highway.h>

#include "smartinf/kernels/rules.h"
#include "smartinf/kernels/tile_kernels_simd.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
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

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
