// The state codecs on vectors, bf16, m24, q8 and q4: those of state_codec.h.
// Part of tile_kernels_simd.cc, which includes it once for every instruction set.
#if defined(SMARTINF_KERNELS_CODECS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SMARTINF_KERNELS_CODECS_INL_H_
#undef SMARTINF_KERNELS_CODECS_INL_H_
#else
#define SMARTINF_KERNELS_CODECS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

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

void encode_bf16(const Progression& numbers, const float* in, uint16_t* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  RandomVectors random(numbers, lanes);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF value = canonical_nan(hn::LoadU(F32(), in + i));
    store_upper_halves(round_bf16_random(value, random.next()), out + i);
  }
  for (; i < n; ++i) {
    out[i] = round_bf16(in[i], random_number(numbers, i));
  }
}

// Two vectors of m24: the upper halves of both, which fill one vector, and the bytes below them.
HWY_INLINE void store_m24(VU first, VU second, uint16_t* upper, uint8_t* lower) {
  const U8 u8;
  store_upper_halves(first, second, upper);
  hn::StoreU(hn::TruncateTo(u8, hn::ShiftRight<kM24Cut>(first)), u8, lower);
  hn::StoreU(hn::TruncateTo(u8, hn::ShiftRight<kM24Cut>(second)), u8, lower + hn::Lanes(u8));
}

HWY_INLINE VF load_m24(const uint16_t* upper, const uint8_t* lower) {
  const VU high = hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), upper)));
  const VU low = hn::ShiftLeft<kM24Cut>(hn::PromoteTo(U32(), hn::LoadU(U8(), lower)));
  return float_of(hn::Or(high, low));
}

void encode_m24(const Progression& numbers, const float* in, uint16_t* upper, uint8_t* lower,
                size_t n) {
  const size_t lanes = hn::Lanes(F32());
  RandomVectors random(numbers, lanes);
  const auto rounded = [&](const float* from) HWY_ATTR {
    const VF value = canonical_nan(hn::LoadU(F32(), from));
    return hn::Add(bits_of(value), hn::ShiftRight<32 - kM24Cut>(random.next()));
  };
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const VU first = rounded(in + i);
    const VU second = rounded(in + i + lanes);
    store_m24(first, second, upper + i, lower + i);
  }
  for (; i < n; ++i) {
    const uint32_t bits = round_m24(in[i], random_number(numbers, i));
    upper[i] = static_cast<uint16_t>(bits >> 16);
    lower[i] = static_cast<uint8_t>(bits >> kM24Cut);
  }
}

void decode_m24(const uint16_t* upper, const uint8_t* lower, float* out, size_t n) {
  const size_t lanes = hn::Lanes(F32());
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(load_m24(upper + i, lower + i), F32(), out + i);
  }
  if (i < n) scalar_tiles().decode_m24(upper + i, lower + i, out + i, n - i);
}

template <int kBits, PlaneKind kKind>
constexpr int code_cut() {
  return kKind == PlaneKind::kVariance ? root_cut(kBits) : momentum_cut(kBits);
}
template <int kBits, PlaneKind kKind>
constexpr float code_bias() {
  return kKind == PlaneKind::kVariance ? root_bias(kBits) : 2.0f;
}

// An f32 whose upper part is the value's code: the bits above the cut of its plane.
template <int kBits, PlaneKind kKind>
HWY_INLINE VU encode(VF value, VF inverse, VU random) {
  constexpr float kBias = code_bias<kBits, kKind>();
  const VF steps = hn::Mul(value, inverse);
  VF bias = set(kBias);
  if constexpr (kKind == PlaneKind::kMomentum) {
    bias = float_of(hn::OrAnd(bits_of(bias), bits_of(steps), set_bits(kSignBit)));
  }
  VF biased = hn::Add(steps, bias);
  if constexpr (kBias < 2) biased = hn::Max(biased, set(2.0f));
  return hn::Add(bits_of(biased), hn::ShiftRight<32 - code_cut<kBits, kKind>()>(random));
}

// (z - bias) * step. The difference is exact and so is bias * step: fused it is the same number.
template <int kBits, PlaneKind kKind>
HWY_INLINE VF code_times_step(VU z, VF step) {
  constexpr float kBias = code_bias<kBits, kKind>();
  static_assert(kBias == 2 || kBias == 1);
#if HWY_NATIVE_FMA
  // A product, not a negation: the step of a broken group must stay the canonical NaN.
  return hn::MulAdd(float_of(z), step, hn::Mul(step, set(-kBias)));
#else
  return hn::Mul(hn::Sub(float_of(z), set(kBias)), step);
#endif
}

// Bits of each lane from kFrom on move to kTo.
template <int kFrom, int kTo>
HWY_INLINE VU move_bits(VU words) {
  if constexpr (kTo >= kFrom) {
    return hn::ShiftLeft<kTo - kFrom>(words);
  } else {
    return hn::ShiftRight<kFrom - kTo>(words);
  }
}

// Values of codes kIndex of each lane.
template <int kBits, PlaneKind kKind, int kIndex>
HWY_INLINE VF decode(VU words, VF step) {
  constexpr int kCut = code_cut<kBits, kKind>();
  constexpr bool kRoot = kKind == PlaneKind::kVariance;
  constexpr uint32_t kCodes = kRoot ? root_codes(kBits) : momentum_codes(kBits);
  const VU code = move_bits<kBits * kIndex, kCut>(words);
  const VU bits = hn::OrAnd(set_bits(kCodeBiasBits), code, set_bits((kCodes - 1) << kCut));
  const VF value = code_times_step<kBits, kKind>(bits, step);
  if constexpr (kRoot) return hn::Mul(value, value);
  const VU sign = hn::ShiftLeft<32 - kBits*(kIndex + 1)>(words);
  return float_of(hn::OrAnd(bits_of(value), sign, set_bits(kSignBit)));
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

// Codes of 8 bits from what encode() made of four vectors, byte j of a lane from vector j. In
// halves: two vectors at a time.
template <PlaneKind kKind>
HWY_INLINE VU pack_bytes(VU bits0, VU bits1, VU bits2, VU bits3) {
  constexpr int kCut = code_cut<8, kKind>();
  const VU even = upper_halves(bits0, bits2);
  const VU odd = upper_halves(bits1, bits3);
  if constexpr (kKind == PlaneKind::kVariance) {
    return select_bits(0x00ff00ffu, hn::ShiftRight<kCut - 16>(even), hn::ShiftLeft<24 - kCut>(odd));
  } else {
    const VU magnitudes =
        select_bits(0x007f007fu, hn::ShiftRight<kCut - 16>(even), hn::ShiftLeft<24 - kCut>(odd));
    const VU signs = select_bits(0x00ff00ffu, hn::ShiftRight<8>(even), odd);
    return select_bits(0x80808080u, signs, magnitudes);
  }
}

// Codes of 4 bits from what encode() made of two vectors, of the first in the lower half of each
// lane, of the other in the upper one, both from bit 4 * kIndex of the half on.
template <PlaneKind kKind, int kIndex>
HWY_INLINE VU two_nibbles(VU lower, VU upper) {
  constexpr int kAt = code_cut<4, kKind>() - 16;
  VU halves = upper_halves(lower, upper);
  if constexpr (kKind == PlaneKind::kMomentum) {  // the sign next to the magnitude
    halves = select_bits(0x00080008u << kAt, hn::ShiftRight<12 - kAt>(halves), halves);
  }
  return hn::And(move_bits<kAt, 4 * kIndex>(halves), set_bits(0x000f000fu << (4 * kIndex)));
}

/// A word of codes for each lane, from the vectors that encoded(0), encoded(1), ... return.
template <int kBits, PlaneKind kKind, typename Encoded>
HWY_INLINE VU pack_codes(const Encoded& encoded) {
  if constexpr (kBits == 8) {
    return pack_bytes<kKind>(encoded(0), encoded(1), encoded(2), encoded(3));
  } else {
    const VU even = hn::Or(two_nibbles<kKind, 0>(encoded(0), encoded(4)),
                           two_nibbles<kKind, 2>(encoded(2), encoded(6)));
    const VU odd = hn::Or(two_nibbles<kKind, 1>(encoded(1), encoded(5)),
                          two_nibbles<kKind, 3>(encoded(3), encoded(7)));
    return hn::Or(even, odd);
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

/// Encodes a group a column at a time: elements word + lane + kWords * j, which share words.
template <int kBits, PlaneKind kKind>
class GroupEncoder {
 public:
  static constexpr size_t kWords = code_words(kBits);

  GroupEncoder() = default;
  GroupEncoder(const GroupValues& group, float step, const Progression& numbers, uint8_t* out)
      : values_(group.values),
        out_(reinterpret_cast<uint32_t*>(out)),
        inverse_(set(group_inverse(step))),
        column_(set_bits(numbers.stride * static_cast<uint32_t>(kWords))),
        random_(numbers, hn::Lanes(F32())) {}

  HWY_INLINE void column(size_t word) {
    const float* values = values_ + word;
    VU random[32 / kBits] = {random_.next()};
    for (size_t j = 1; j < 32 / kBits; ++j) random[j] = hn::Add(random[j - 1], column_);
    const auto encoded = [&](size_t j) HWY_ATTR {
      return encode<kBits, kKind>(hn::Load(F32(), values + j * kWords), inverse_, random[j]);
    };
    const VU words = pack_codes<kBits, kKind>(encoded);
    hn::StoreU(words, U32(), out_ + word);
    if constexpr (kNoZero) {
      smallest_ = hn::Min(smallest_, hn::BitCast(hn::Repartition<uint8_t, U32>(), words));
    }
  }

  /// To be called after the last column.
  HWY_INLINE void finish() {
    if constexpr (kNoZero) {
      const hn::Repartition<uint8_t, U32> u8;
      if (HWY_UNLIKELY(!hn::AllFalse(u8, hn::Eq(smallest_, hn::Zero(u8))))) keep_above_zero();
    }
  }

  HWY_INLINE void all() {
    for (size_t word = 0; word < kWords; word += hn::Lanes(F32())) column(word);
    finish();
  }

 private:
  /// Whether only +0 gets code 0; there is no other in q4.
  static constexpr bool kNoZero = kKind == PlaneKind::kVariance && kBits == 8;

  HWY_NOINLINE void keep_above_zero() {
    const hn::Repartition<uint8_t, U32> u8;
    // 1 in the byte of a root that is not 0; such roots of f32 have more than this as bits.
    const auto least = [&](size_t word, int byte) HWY_ATTR {
      const VF root = hn::Load(F32(), values_ + word + static_cast<size_t>(byte) * kWords);
      return hn::Min(bits_of(root), set_bits(1u << (8 * byte)));
    };
    for (size_t word = 0; word < kWords; word += hn::Lanes(F32())) {
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
  VU column_ = hn::Zero(U32());  // from one column's random numbers to the next
  RandomVectors random_;
};

/// The step of a group whose largest magnitude is known.
template <int kBits, PlaneKind kKind>
HWY_INLINE float step_of(VI largest) {
  return group_step(kBits, kKind,
                    static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(I32(), largest))));
}

/// Encodes a group whose largest magnitude is known. Returns its step.
template <int kBits, PlaneKind kKind>
HWY_INLINE float encode_group(const GroupValues& group, VI largest, const Progression& numbers,
                              uint8_t* out) {
  const float step = step_of<kBits, kKind>(largest);
  if (HWY_UNLIKELY(!(step > 0))) {
    std::fill_n(out, code_words(kBits) * sizeof(uint32_t), uint8_t{0});
  } else {
    GroupEncoder<kBits, kKind>(group, step, numbers, out).all();
  }
  return step;
}

/// Calls work<bits, plane>() for those that a call names.
template <typename Work>
HWY_INLINE auto with_codes(int bits, PlaneKind kind, const Work& work) {
  if (kind == PlaneKind::kVariance) {
    return bits == 8 ? work.template operator()<8, PlaneKind::kVariance>()
                     : work.template operator()<4, PlaneKind::kVariance>();
  }
  return bits == 8 ? work.template operator()<8, PlaneKind::kMomentum>()
                   : work.template operator()<4, PlaneKind::kMomentum>();
}

float encode_codes(int bits, PlaneKind kind, const Progression& numbers, const float* in,
                   uint8_t* out, size_t n) {
  if (n < kTileElements) return scalar_tiles().encode_codes(bits, kind, numbers, in, out, n);
  return with_codes(bits, kind, [&]<int kBits, PlaneKind kKind>() HWY_ATTR {
    GroupValues group;
    for (size_t i = 0; i < kTileElements; i += hn::Lanes(F32())) {
      VF value = hn::LoadU(F32(), in + i);
      if constexpr (kKind == PlaneKind::kVariance) value = hn::Sqrt(value);
      hn::Store(value, F32(), group.values + i);
    }
    return encode_group<kBits, kKind>(group, largest_of(group), numbers, out);
  });
}

/// Calls each(index) for the codes of a word of so many bits, known to the compiler.
template <int kBits, typename Each>
HWY_INLINE void each_code(const Each& each) {
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) HWY_ATTR {
    (each(std::integral_constant<int, static_cast<int>(kIndex)>()), ...);
  }
  (std::make_index_sequence<32 / kBits>());
}

void decode_codes(int bits, PlaneKind kind, float step, const uint8_t* in, float* out, size_t n) {
  if (n < kTileElements) return scalar_tiles().decode_codes(bits, kind, step, in, out, n);
  with_codes(bits, kind, [&]<int kBits, PlaneKind kKind>() HWY_ATTR {
    const VF steps = set(step);
    for (size_t word = 0; word < code_words(kBits); word += hn::Lanes(F32())) {
      const VU words = hn::LoadU(U32(), reinterpret_cast<const uint32_t*>(in) + word);
      each_code<kBits>([&](auto index) HWY_ATTR {
        hn::StoreU(decode<kBits, kKind, index>(words, steps), F32(),
                   out + word + index * code_words(kBits));
      });
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
