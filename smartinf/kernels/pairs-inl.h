// Code shared by passes of error feedback over bf16. They widen and narrow without moving bits
// between 32-bit lanes: a vector holds elements 0, 2, 4, ... of two vectors' worth in a row and
// another 1, 3, 5, ... Compiled for every instruction set: it is included once by each, after
// highway.h.
#if defined(SMARTINF_KERNELS_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SMARTINF_KERNELS_PAIRS_INL_H_
#undef SMARTINF_KERNELS_PAIRS_INL_H_
#else
#define SMARTINF_KERNELS_PAIRS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/kernels/feedback_kernels.h"
#include "smartinf/kernels/state_codec.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels::HWY_NAMESPACE {
namespace pairs {
namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using Halves = hn::Repartition<uint16_t, F32>;
}  // namespace pairs

inline constexpr size_t kLineElements = 64 / sizeof(base::Bf16);  // of a cache line

struct EvenOdd {
  pairs::hn::Vec<pairs::F32> even, odd;
};

/// The upper half of each lane as an f32.
HWY_INLINE pairs::hn::Vec<pairs::F32> upper_half(pairs::hn::Vec<pairs::U32> bits) {
  namespace hn = hwy::HWY_NAMESPACE;
  return hn::BitCast(pairs::F32(), hn::And(bits, hn::Set(pairs::U32(), 0xffff0000u)));
}

HWY_INLINE EvenOdd widened_pairs(const base::Bf16* in) {
  namespace hn = hwy::HWY_NAMESPACE;
  const auto both =
      hn::BitCast(pairs::U32(), hn::LoadU(pairs::Halves(), reinterpret_cast<const uint16_t*>(in)));
  return {hn::BitCast(pairs::F32(), hn::ShiftLeft<16>(both)), upper_half(both)};
}

/// The upper halves of both, back in their order.
HWY_INLINE void store_pairs(pairs::hn::Vec<pairs::U32> even, pairs::hn::Vec<pairs::U32> odd,
                            base::Bf16* out) {
  namespace hn = hwy::HWY_NAMESPACE;
  const auto lower = hn::ShiftRight<16>(even);
  hn::StoreU(hn::OddEven(hn::BitCast(pairs::Halves(), odd), hn::BitCast(pairs::Halves(), lower)),
             pairs::Halves(), reinterpret_cast<uint16_t*>(out));
}

/// Bit i of 32 goes to place 2 i.
HWY_INLINE uint64_t spread(uint64_t bits) {
#if HWY_TARGET == HWY_AVX3  // below it there are processors where the instruction is slow
  return _pdep_u64(bits, 0x5555555555555555u);
#else
  bits = (bits | bits << 16) & 0x0000ffff0000ffffu;
  bits = (bits | bits << 8) & 0x00ff00ff00ff00ffu;
  bits = (bits | bits << 4) & 0x0f0f0f0f0f0f0f0fu;
  bits = (bits | bits << 2) & 0x3333333333333333u;
  return (bits | bits << 1) & 0x5555555555555555u;
#endif
}

/// Lanes added in halves: the order of sum_of_lanes() within a vector.
template <class D>
HWY_INLINE float sum_of_vector(D d, hwy::HWY_NAMESPACE::Vec<D> sums) {
  namespace hn = hwy::HWY_NAMESPACE;
  if constexpr (hn::MaxLanes(D()) == 1) {
    return hn::GetLane(sums);
  } else {
    const hn::Half<D> half;
    return sum_of_vector(half, hn::Add(hn::LowerHalf(half, sums), hn::UpperHalf(half, sums)));
  }
}
template <size_t kVectors>
HWY_INLINE pairs::hn::Vec<pairs::F32> sum_of_vectors(pairs::hn::Vec<pairs::F32> (&sums)[kVectors]) {
  for (size_t half = kVectors / 2; half > 0; half /= 2) {
    for (size_t v = 0; v < half; ++v) {
      sums[v] = hwy::HWY_NAMESPACE::Add(sums[v], sums[v + half]);
    }
  }
  return sums[0];
}

/// Squares added up in f32 by the lanes of kSquaresGroup elements, in feedback_kernels.h's order.
struct SquaresByLane {
  static constexpr size_t kPairs = kSquaresLanes / (2 * pairs::hn::MaxLanes(pairs::F32()));
  pairs::hn::Vec<pairs::F32> even[kPairs];
  pairs::hn::Vec<pairs::F32> odd[kPairs];

  HWY_INLINE SquaresByLane() {
    for (size_t p = 0; p < kPairs; ++p) even[p] = odd[p] = pairs::hn::Zero(pairs::F32());
  }
  HWY_INLINE void add(size_t p, const EvenOdd& value) {
    even[p] = pairs::hn::Add(even[p], pairs::hn::Mul(value.even, value.even));
    odd[p] = pairs::hn::Add(odd[p], pairs::hn::Mul(value.odd, value.odd));
  }
  /// in: the group. Uses the sums up.
  HWY_INLINE double sum(const base::Bf16* in) {
    const float sum = sum_of_vector(pairs::F32(), sum_of_vectors(even)) +
                      sum_of_vector(pairs::F32(), sum_of_vectors(odd));
    return sum_in_range(sum, in, kSquaresGroup);
  }
};

/// scale * gradient + residual, as FeedbackKernels::add().
HWY_INLINE EvenOdd feedback_sums(const base::Bf16* gradient, const base::Bf16* residual,
                                 pairs::hn::Vec<pairs::F32> scales) {
  namespace hn = hwy::HWY_NAMESPACE;
  const EvenOdd value = widened_pairs(gradient);
  const EvenOdd waiting = widened_pairs(residual);
  return {hn::Add(hn::Mul(scales, value.even), waiting.even),
          hn::Add(hn::Mul(scales, value.odd), waiting.odd)};
}

/// The momentum's random numbers of a rounding group, pair by pair.
class PairRounding {
 public:
  HWY_INLINE explicit PairRounding(const RoundingKey& key)
      : stride_(pairs::hn::Set(pairs::U32(), key.momentum.stride)),
        step_(pairs::hn::Set(
            pairs::U32(),
            key.momentum.stride * static_cast<uint32_t>(2 * pairs::hn::Lanes(pairs::F32())))),
        random_(pairs::hn::Add(
            pairs::hn::Set(pairs::U32(), key.momentum.start),
            pairs::hn::Mul(pairs::hn::Iota(pairs::U32(), 0), pairs::hn::Add(stride_, stride_)))) {}
  /// round_bf16() of what is not NaN, in the upper halves; for even elements, then for odd ones.
  HWY_INLINE pairs::hn::Vec<pairs::U32> even(pairs::hn::Vec<pairs::F32> value) const {
    return rounded(value, random_);
  }
  HWY_INLINE pairs::hn::Vec<pairs::U32> odd(pairs::hn::Vec<pairs::F32> value) const {
    return rounded(value, pairs::hn::Add(random_, stride_));
  }
  HWY_INLINE void go_on() { random_ = pairs::hn::Add(random_, step_); }

 private:
  static HWY_INLINE pairs::hn::Vec<pairs::U32> rounded(pairs::hn::Vec<pairs::F32> value,
                                                       pairs::hn::Vec<pairs::U32> by) {
    return pairs::hn::Add(pairs::hn::BitCast(pairs::U32(), value), pairs::hn::ShiftRight<16>(by));
  }
  pairs::hn::Vec<pairs::U32> stride_;
  pairs::hn::Vec<pairs::U32> step_;
  pairs::hn::Vec<pairs::U32> random_;
};

/// Four groups ahead of `first`, over the ends of pages, at which the processor's own prefetching
/// stops; not beyond the last of n elements, whole groups.
HWY_INLINE void prefetch_pairs(const base::Bf16* gradient, const base::Bf16* residual, size_t first,
                               size_t n) {
  const size_t fetched = std::min(first + 4 * kSquaresGroup, n - kSquaresGroup);
  for (size_t i = fetched; i < fetched + kSquaresGroup; i += kLineElements) {
    hwy::Prefetch(gradient + i);
    hwy::Prefetch(residual + i);
  }
}

}  // namespace smartinf::kernels::HWY_NAMESPACE
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();
#endif
