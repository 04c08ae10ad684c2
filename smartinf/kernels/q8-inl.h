// The state codecs on vectors, bf16 and q8: those of state_codec.h.
// Part of tile_kernels_simd.cc, which includes it once for every instruction set.
#if defined(SMARTINF_KERNELS_Q8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SMARTINF_KERNELS_Q8_INL_H_
#undef SMARTINF_KERNELS_Q8_INL_H_
#else
#define SMARTINF_KERNELS_Q8_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <hwy/highway.h>

#include "smartinf/kernels/casts-inl.h"
#include "smartinf/kernels/state_codec.h"
#include "smartinf/kernels/tile_kernels_simd.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
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

// Values of the codes in byte kByte of each lane.
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

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
