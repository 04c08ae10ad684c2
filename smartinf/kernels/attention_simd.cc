// The fold as one Highway body for every instruction set: lanes run over tokens in the products of
// queries and keys, and over channels where values are weighted, so that additions have the order
// of the scalar truth. Rows share the loads of a head.
#include <algorithm>
#include <cstring>

#include "smartinf/kernels/attention_arithmetic.h"
#include "smartinf/kernels/attention_kernels.h"
#include "smartinf/kernels/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "smartinf/kernels/attention_simd.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
namespace attention {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using VF = hn::Vec<F32>;
constexpr size_t kTokens = kCacheBlockTokens;
constexpr size_t kVectors = kTokens / hn::MaxLanes(F32());

/// As fused().
template <class D>
HWY_INLINE hn::Vec<D> multiply_add([[maybe_unused]] D d, hn::Vec<D> a, hn::Vec<D> b,
                                   hn::Vec<D> sum) {
#if HWY_ARCH_ARM_A64 || (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2)
  return hn::MulAdd(a, b, sum);
#else
  float lanes[3][hn::MaxLanes(D())];
  hn::StoreU(a, d, lanes[0]);
  hn::StoreU(b, d, lanes[1]);
  hn::StoreU(sum, d, lanes[2]);
  for (size_t i = 0; i < hn::Lanes(d); ++i) {
    lanes[2][i] = fused(lanes[0][i], lanes[1][i], lanes[2][i]);
  }
  return hn::LoadU(d, lanes[2]);
#endif
}

template <class D>
struct Pair {
  hn::Vec<D> a, b;
};

// Two vectors' worth of numbers in a row, kept or in f32. Those of bf16 are widened without moving
// bits between lanes: one vector has numbers 0, 2, 4, ..., the other 1, 3, 5, ...
template <CacheFormat>
struct Kept;

template <>
struct Kept<CacheFormat::kBf16> {
  using Number = uint16_t;
  static float widened(Number number) { return SI_FLOAT_OF(uint32_t{number} << 16); }
  template <class D>
  static HWY_INLINE Pair<D> load(D d, const Number* in) {
    const hn::RebindToUnsigned<D> u32;
    const auto both = hn::BitCast(u32, hn::LoadU(hn::Repartition<uint16_t, D>(), in));
    return {hn::BitCast(d, hn::ShiftLeft<16>(both)),
            hn::BitCast(d, hn::And(both, hn::Set(u32, 0xffff0000u)))};
  }
  template <class D>
  static HWY_INLINE Pair<D> load_f32(D d, const float* in) {
    Pair<D> pair;
    hn::LoadInterleaved2(d, in, pair.a, pair.b);
    return pair;
  }
  template <class D>
  static HWY_INLINE void store_f32(D d, Pair<D> pair, float* out) {
    hn::StoreInterleaved2(pair.a, pair.b, d, out);
  }
};

struct InOrder {
  template <class D>
  static HWY_INLINE Pair<D> load_f32(D d, const float* in) {
    return {hn::LoadU(d, in), hn::LoadU(d, in + hn::Lanes(d))};
  }
  template <class D>
  static HWY_INLINE void store_f32(D d, Pair<D> pair, float* out) {
    hn::StoreU(pair.a, d, out);
    hn::StoreU(pair.b, d, out + hn::Lanes(d));
  }
};

template <>
struct Kept<CacheFormat::kF32> : InOrder {
  using Number = float;
  static float widened(Number number) { return number; }
  template <class D>
  static HWY_INLINE Pair<D> load(D d, const Number* in) {
    return load_f32(d, in);
  }
};

template <>
struct Kept<CacheFormat::kQ8> : InOrder {
  using Number = int8_t;
  static float widened(Number number) { return static_cast<float>(number); }
  template <class D>
  static HWY_INLINE hn::Vec<D> widened(D d, const Number* in) {
    const hn::RebindToSigned<D> i32;
    return hn::ConvertTo(d, hn::PromoteTo(i32, hn::LoadU(hn::Rebind<int8_t, D>(), in)));
  }
  template <class D>
  static HWY_INLINE Pair<D> load(D d, const Number* in) {
    return {widened(d, in), widened(d, in + hn::Lanes(d))};
  }
};

/// Into the second cache: more lines can be on their way to it than to the first.
template <size_t kBytes>
HWY_INLINE void prefetch(const std::byte* from) {
  for (size_t i = 0; i < kBytes; i += 64) __builtin_prefetch(from + i, /*rw=*/0, /*locality=*/2);
}

/// Sums of products of each query with each key.
template <CacheFormat kFormat, size_t kRows>
HWY_INLINE void dot_products(const HeadOfBlock& head, const FoldRow* rows,
                             float (*HWY_RESTRICT scores)[kTokens]) {
  using Number = typename Kept<kFormat>::Number;
  const F32 d;
  const auto* const keys = reinterpret_cast<const Number*>(head.keys);
  const size_t width = head.head_width;
  const float* queries[kRows];
  for (size_t r = 0; r < kRows; ++r) queries[r] = rows[r].query;
  for (size_t t = 0; t < kTokens; t += 2 * hn::Lanes(d)) {
    Pair<F32> sums[kRows];
    for (auto& sum : sums) sum = {hn::Zero(d), hn::Zero(d)};
    const auto add_channel = [&](size_t c) HWY_ATTR {
      const Pair<F32> key = Kept<kFormat>::load(d, keys + c * kTokens + t);
      for (size_t r = 0; r < kRows; ++r) {
        const VF query = hn::Set(d, queries[r][c]);
        sums[r].a = multiply_add(d, query, key.a, sums[r].a);
        sums[r].b = multiply_add(d, query, key.b, sums[r].b);
      }
    };
    size_t c = 0;
    for (; c + 2 <= width; c += 2) {
      // As many values as there are keys: they come while these are computed with.
      if (t == 0) {
        prefetch<2 * kTokens * sizeof(Number)>(head.values + c * kTokens * sizeof(Number));
      }
      add_channel(c);
      add_channel(c + 1);
    }
    if (c < width) add_channel(c);
    for (size_t r = 0; r < kRows; ++r) Kept<kFormat>::store_f32(d, sums[r], scores[r] + t);
  }
}

// As exp_of_negative().
HWY_INLINE VF exp_of(VF x) {
  const F32 d;
  const hn::RebindToUnsigned<F32> u32;
  const VF shifted = hn::Add(hn::Mul(x, hn::Set(d, kLog2OfE)), hn::Set(d, kExpRound));
  const VF n = hn::Sub(shifted, hn::Set(d, kExpRound));
  const VF r = hn::Sub(hn::Sub(x, hn::Mul(n, hn::Set(d, kLn2Upper))),
                       hn::Mul(n, hn::Set(d, kLn2Lower)));
  VF sum = hn::Add(hn::Mul(hn::Set(d, kExp5), r), hn::Set(d, kExp4));
  for (const float factor : {kExp3, kExp2, kExp1, kExp0}) {
    sum = hn::Add(hn::Mul(sum, r), hn::Set(d, factor));
  }
  sum = hn::Add(hn::Add(hn::Mul(sum, hn::Mul(r, r)), r), hn::Set(d, 1.0f));
  const auto exponent =
      hn::Add(hn::BitCast(u32, shifted), hn::Set(u32, 127u - kExpRoundBits));
  const VF power = hn::BitCast(d, hn::ShiftLeft<23>(exponent));
  return hn::IfThenElse(hn::Lt(x, hn::Set(d, kExpLeast)), hn::Zero(d), hn::Mul(sum, power));
}

// As soft_capped().
HWY_INLINE VF capped(VF x, float cap) {
  const F32 d;
  const VF sign = hn::Set(d, -0.0f);
  const VF y = hn::Mul(x, hn::Set(d, 1.0f / cap));
  const VF e = exp_of(hn::Mul(hn::Or(y, sign), hn::Set(d, 2.0f)));
  const VF one = hn::Set(d, 1.0f);
  const VF result = hn::Mul(hn::Div(hn::Sub(one, e), hn::Add(one, e)), hn::Set(d, cap));
  return hn::Or(result, hn::And(y, sign));
}

template <class D>
HWY_INLINE float sum_of_lanes(D d, hn::Vec<D> sums) {
  if constexpr (hn::MaxLanes(D()) == 1) {
    return hn::GetLane(sums);
  } else {
    const hn::Half<D> half;
    return sum_of_lanes(half, hn::Add(hn::LowerHalf(half, sums), hn::UpperHalf(half, sums)));
  }
}

/// Makes sums of products to scores, and those to weights; folds them into the largest score and
/// the sum of each row's state. rescale: what the values of the state are multiplied by.
template <size_t kRows>
HWY_NOINLINE void weigh(const HeadOfBlock& head, const FoldRow* rows,
                        float (*HWY_RESTRICT weights)[kTokens], float* HWY_RESTRICT rescale) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  const VF least = hn::Set(d, SI_FLOAT_OF(kMinusInfinityBits));
  const VF first = hn::Set(d, static_cast<float>(head.first));
  const VF end = hn::Set(d, static_cast<float>(head.end));
  const bool q8 = head.format == CacheFormat::kQ8;
  VF largest[kRows];
  for (VF& score : largest) score = least;
  for (size_t v = 0; v < kVectors; ++v) {
    const VF token = hn::Iota(d, static_cast<float>(v * lanes));
    const auto seen = hn::And(hn::Ge(token, first), hn::Lt(token, end));
    const VF row_scales = q8 ? hn::LoadU(d, head.key_scales + v * lanes) : hn::Set(d, 1.0f);
    for (size_t r = 0; r < kRows; ++r) {
      VF score = hn::Mul(hn::Load(d, weights[r] + v * lanes), row_scales);
      score = hn::Mul(score, hn::Set(d, head.scale));
      if (head.softcap > 0) score = capped(score, head.softcap);
      score = hn::IfThenElse(seen, score, least);
      hn::Store(score, d, weights[r] + v * lanes);
      largest[r] = hn::Max(largest[r], hn::IfThenElse(hn::IsNaN(score), least, score));
    }
  }
  float bases[kRows];
  for (size_t r = 0; r < kRows; ++r) {
    float& max = rows[r].state[0];
    const float old_max = max;
    max = without_sign_of_zero(greater(old_max, hn::GetLane(hn::MaxOfLanes(d, largest[r]))));
    bases[r] = score_base(max);
    // Most blocks change no maximum.
    rescale[r] = old_max == bases[r] ? 1.0f : exp_of_negative(old_max - bases[r]);
  }
  VF sums[kRows][kVectors];
  for (size_t v = 0; v < kVectors; ++v) {
    const VF row_scales = q8 ? hn::LoadU(d, head.value_scales + v * lanes) : hn::Set(d, 1.0f);
    for (size_t r = 0; r < kRows; ++r) {
      const VF weight = exp_of(hn::Sub(hn::Load(d, weights[r] + v * lanes), hn::Set(d, bases[r])));
      sums[r][v] = weight;
      hn::Store(hn::Mul(weight, row_scales), d, weights[r] + v * lanes);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t half = kVectors / 2; half > 0; half /= 2) {
      for (size_t v = 0; v < half; ++v) sums[r][v] = hn::Add(sums[r][v], sums[r][v + half]);
    }
    float& sum = rows[r].state[1];
    sum = canonical(sum * rescale[r] + sum_of_lanes(d, sums[r][0]));
  }
}

/// Weighted values of kPairs pairs of vectors of channels from `channel` on.
template <CacheFormat kFormat, size_t kRows, size_t kPairs, class D>
HWY_INLINE void add_values(D d, const HeadOfBlock& head, const FoldRow* rows, size_t channel,
                           const float* rescale, const float (*HWY_RESTRICT weights)[kTokens]) {
  using Number = typename Kept<kFormat>::Number;
  const size_t step = 2 * hn::Lanes(d);
  const auto* const values = reinterpret_cast<const Number*>(head.values);
  Pair<D> sums[kRows][kPairs];
  for (size_t r = 0; r < kRows; ++r) {
    const auto factor = hn::Set(d, rescale[r]);
    for (size_t p = 0; p < kPairs; ++p) {
      Pair<D>& sum = sums[r][p];
      sum = Kept<kFormat>::load_f32(d, rows[r].state + 2 + channel + p * step);
      sum = {hn::Mul(sum.a, factor), hn::Mul(sum.b, factor)};
    }
  }
  for (size_t t = head.first; t < head.end; ++t) {
    const size_t at = t * head.head_width + channel;
    prefetch<kPairs * 2 * hn::MaxLanes(D()) * sizeof(Number)>(head.next_keys + at * sizeof(Number));
    const Number* const row = values + at;
    Pair<D> value[kPairs];
    for (size_t p = 0; p < kPairs; ++p) value[p] = Kept<kFormat>::load(d, row + p * step);
    for (size_t r = 0; r < kRows; ++r) {
      const auto weight = hn::Set(d, weights[r][t]);
      for (size_t p = 0; p < kPairs; ++p) {
        sums[r][p].a = multiply_add(d, weight, value[p].a, sums[r][p].a);
        sums[r][p].b = multiply_add(d, weight, value[p].b, sums[r][p].b);
      }
    }
  }
  const auto nan = hn::Set(d, SI_FLOAT_OF(kCanonicalNan));
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t p = 0; p < kPairs; ++p) {
      Pair<D>& sum = sums[r][p];
      sum.a = hn::IfThenElse(hn::IsNaN(sum.a), nan, sum.a);
      sum.b = hn::IfThenElse(hn::IsNaN(sum.b), nan, sum.b);
      Kept<kFormat>::store_f32(d, sum, rows[r].state + 2 + channel + p * step);
    }
  }
}

/// The channels that fill no vectors.
template <CacheFormat kFormat>
void add_last_values(const HeadOfBlock& head, float* state, size_t channel, float rescale,
                     const float* weights) {
  const auto* const values = reinterpret_cast<const typename Kept<kFormat>::Number*>(head.values);
  for (size_t c = channel; c < head.head_width; ++c) {
    float sum = state[2 + c] * rescale;
    for (size_t t = head.first; t < head.end; ++t) {
      sum = fused(weights[t], Kept<kFormat>::widened(values[t * head.head_width + c]), sum);
    }
    state[2 + c] = canonical(sum);
  }
}

// Where there are 32 registers, two pairs of vectors for each of four rows stay in them.
constexpr size_t kPairsAtOnce = HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON ? 2 : 1;

template <CacheFormat kFormat, size_t kRows>
void fold(const HeadOfBlock& head, const FoldRow* rows) {
  const F32 d;
  const hn::CappedTag<float, 8> small;  // heads are multiples of 16
  alignas(64) float weights[kRows][kTokens];
  alignas(64) float rescale[kRows];
  dot_products<kFormat, kRows>(head, rows, weights);
  weigh<kRows>(head, rows, weights, rescale);
  const size_t step = 2 * hn::Lanes(d);
  const size_t width = head.head_width;
  size_t c = 0;
  for (; c + kPairsAtOnce * step <= width; c += kPairsAtOnce * step) {
    add_values<kFormat, kRows, kPairsAtOnce>(d, head, rows, c, rescale, weights);
  }
  const size_t small_step = 2 * hn::Lanes(small);
  for (; c + small_step <= width; c += small_step) {
    add_values<kFormat, kRows, 1>(small, head, rows, c, rescale, weights);
  }
  if (c == width) return;
  for (size_t r = 0; r < kRows; ++r) {
    add_last_values<kFormat>(head, rows[r].state, c, rescale[r], weights[r]);
  }
}

template <CacheFormat kFormat>
void fold_format(const HeadOfBlock& head, const FoldRow* rows, size_t count) {
  if (count >= 4) return fold<kFormat, 4>(head, rows);
  if (count >= 2) fold<kFormat, 2>(head, rows);
  if (count % 2 != 0) fold<kFormat, 1>(head, rows + (count - 1));
}

void fold_rows(const HeadOfBlock& head, const FoldRow* rows, size_t count) {
  switch (head.format) {
    case CacheFormat::kBf16:
      return fold_format<CacheFormat::kBf16>(head, rows, count);
    case CacheFormat::kF32:
      return fold_format<CacheFormat::kF32>(head, rows, count);
    case CacheFormat::kQ8:
      return fold_format<CacheFormat::kQ8>(head, rows, count);
  }
}

}  // namespace attention

AttentionKernels attention_kernels();
AttentionKernels attention_kernels() { return {.fold_rows = attention::fold_rows}; }

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();
