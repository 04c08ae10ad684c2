// How passes over bf16 widen and narrow them without moving bits between 32-bit lanes: a vector
// holds elements 0, 2, 4, ... of two vectors' worth in a row and another 1, 3, 5, ... Compiled for
// every instruction set: it is included once by each, after highway.h.
#if defined(SMARTINF_KERNELS_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SMARTINF_KERNELS_PAIRS_INL_H_
#undef SMARTINF_KERNELS_PAIRS_INL_H_
#else
#define SMARTINF_KERNELS_PAIRS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include <hwy/highway.h>

#include "smartinf/base/float_formats.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels::HWY_NAMESPACE {
namespace pairs {
namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using Halves = hn::Repartition<uint16_t, F32>;
}  // namespace pairs

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
/// Of squares added up by such lanes.
template <size_t kPairs>
HWY_INLINE float sum_of_pairs(pairs::hn::Vec<pairs::F32> (&even)[kPairs],
                              pairs::hn::Vec<pairs::F32> (&odd)[kPairs]) {
  return sum_of_vector(pairs::F32(), sum_of_vectors(even)) +
         sum_of_vector(pairs::F32(), sum_of_vectors(odd));
}

}  // namespace smartinf::kernels::HWY_NAMESPACE
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();
#endif
