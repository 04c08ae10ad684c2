// Blocks that send signs, as one Highway body for every instruction set.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "smartinf/kernels/feedback_kernels.h"
#include "smartinf/kernels/signs.h"
#include "smartinf/kernels/signs_kernels.h"
#include "smartinf/kernels/state_codec.h"
#include "smartinf/kernels/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "smartinf/kernels/signs_simd.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

#include "smartinf/kernels/candidates-inl.h"
#include "smartinf/kernels/pairs-inl.h"

HWY_BEFORE_NAMESPACE();
#if HWY_TARGET != HWY_SCALAR  // as in tile_kernels_simd.cc
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

SignKernels sign_kernels();

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;

constexpr size_t kWordBits = 64;

HWY_INLINE hn::Vec<I32> magnitudes(hn::Vec<F32> values) {
  return hn::BitCast(I32(), hn::Abs(values));
}

// A word's bits, those of even elements apart from those of odd ones.
struct EvenOddBits {
  uint64_t even = 0;
  uint64_t odd = 0;
  HWY_INLINE uint64_t in_order() const { return spread(even) | spread(odd) << 1; }
};

size_t collect(const SignsPass& pass, size_t n, int32_t lowest, size_t room, float* out) {
  const size_t lanes = hn::Lanes(F32());
  const auto scales = hn::Set(F32(), pass.scale);
  const auto below = hn::Set(I32(), lowest - 1);
  const base::Bf16* const gradient = pass.gradient;
  const base::Bf16* const residual = pass.residual;
  const size_t whole = n - n % kSquaresGroup;
  size_t found = 0;
  for (size_t first = 0; first < whole; first += kSquaresGroup) {
    prefetch_pairs(gradient, residual, first, whole);
    if (room - found <= kSquaresGroup + hn::MaxLanes(F32())) return room;
    for (size_t i = first; i < first + kSquaresGroup; i += 2 * lanes) {
      const EvenOdd value = feedback_sums(gradient + i, residual + i, scales);
      for (const auto half : {magnitudes(value.even), magnitudes(value.odd)}) {
        const auto taken = hn::RebindMask(F32(), hn::Gt(half, below));
        found += put_compressed(F32(), hn::BitCast(F32(), half), taken, out + found);
      }
    }
  }
  const size_t more =
      scalar_signs().collect(pass.from(whole), n - whole, lowest, room - found, out + found);
  return more == room - found ? room : found + more;
}

int32_t largest(const float* in, size_t n) {
  const size_t lanes = hn::Lanes(I32());
  auto most = hn::Zero(I32());
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    most = hn::Max(most, hn::BitCast(I32(), hn::LoadU(F32(), in + i)));
  }
  return std::max(scalar_signs().largest(in + i, n - i), hn::GetLane(hn::MaxOfLanes(I32(), most)));
}

double sum_above(const float* in, size_t n, int32_t threshold) {
  double sum = 0;
  size_t i = 0;
#if HWY_HAVE_FLOAT64
  const size_t lanes = hn::Lanes(F32());
  const auto thresholds = hn::Set(I32(), threshold);
  using F64 = hn::ScalableTag<double>;
  using HalfF32 = hn::Rebind<float, F64>;
  auto lower = hn::Zero(F64());
  auto upper = hn::Zero(F64());
  for (; i + lanes <= n; i += lanes) {
    const auto value = hn::LoadU(F32(), in + i);
    const auto counted = hn::IfThenElseZero(
        hn::RebindMask(F32(), hn::Gt(hn::BitCast(I32(), value), thresholds)), value);
    lower = hn::Add(lower, hn::PromoteTo(F64(), hn::LowerHalf(HalfF32(), counted)));
    upper = hn::Add(upper, hn::PromoteTo(F64(), hn::UpperHalf(HalfF32(), counted)));
  }
  sum = hn::GetLane(hn::SumOfLanes(F64(), hn::Add(lower, upper)));
#endif
  return sum + scalar_signs().sum_above(in + i, n - i, threshold);
}

// Results of residual() for one group. above: thresholds that what is sent is above.
struct ResidualGroup {
  double squares = 0;
  size_t ties = 0;  // elements as large as the threshold
};
template <bool kTies>
HWY_INLINE ResidualGroup residual_group(const SignsPass& pass, const SignsOut& out, size_t first,
                                        hn::Vec<I32> above, size_t pass_size) {
  const size_t lanes = hn::Lanes(F32());
  const base::Bf16* const gradient = pass.gradient + first;
  const base::Bf16* const residual = pass.residual + first;
  base::Bf16* const new_residual = out.new_residual + first;
  const auto scales = hn::Set(F32(), pass.scale);
  const auto threshold = hn::Set(I32(), out.threshold.magnitude);
  const auto magnitude_sent = hn::Set(F32(), out.magnitude);
  PairRounding rounding(rounding_key(out.rounding_seed, out.element + first));
  SquaresByLane squares;
  auto ties = hn::Zero(I32());
  for (size_t word = 0; word < kSquaresGroup; word += kWordBits) {
    EvenOddBits sent;
    EvenOddBits negative;
    // The next block is on its way to the second-level cache while this one is worked on.
    if (first + word + kWordBits <= pass.fetch) {
      for (size_t i = pass_size + word; i < pass_size + word + kWordBits; i += kLineElements) {
        __builtin_prefetch(gradient + i, 0, 2);
        __builtin_prefetch(residual + i, 0, 2);
      }
    }
    for (size_t half = 0; half < kWordBits; half += kSquaresLanes) {
      for (size_t p = 0; p < SquaresByLane::kPairs; ++p) {
        const size_t at = half + p * 2 * lanes;
        const EvenOdd sum = feedback_sums(gradient + word + at, residual + word + at, scales);
        const auto rest = [&](hn::Vec<F32> value, uint64_t& sent_bits,
                              uint64_t& negative_bits) HWY_ATTR {
          const auto bits = hn::BitCast(I32(), value);
          const auto magnitude = magnitudes(value);
          const auto taken = hn::Gt(magnitude, above);
          if (kTies) ties = hn::Sub(ties, hn::VecFromMask(I32(), hn::Eq(magnitude, threshold)));
          sent_bits |= bits_of_mask(I32(), taken) << at / 2;
          negative_bits |= bits_of_mask(I32(), hn::Lt(bits, hn::Zero(I32()))) << at / 2;
          const auto less = hn::Sub(value, hn::CopySign(magnitude_sent, value));
          return hn::IfThenElse(hn::RebindMask(F32(), taken), less, value);
        };
        const auto even = rounding.even(rest(sum.even, sent.even, negative.even));
        const auto odd = rounding.odd(rest(sum.odd, sent.odd, negative.odd));
        store_pairs(even, odd, new_residual + word + at);
        squares.add(p, {upper_half(even), upper_half(odd)});
        rounding.go_on();
      }
    }
    const uint64_t bits = sent.in_order();
    out.sent[(first + word) / kWordBits] = bits;
    out.negative[(first + word) / kWordBits] = negative.in_order() & bits;
  }
  ResidualGroup group{.squares = squares.sum(new_residual)};
  if (kTies && !hn::AllTrue(I32(), hn::Eq(ties, hn::Zero(I32())))) {
    group.ties = static_cast<size_t>(hn::GetLane(hn::SumOfLanes(I32(), ties)));
  }
  return group;
}

// Elements as large as the threshold are all taken up to the group in which there are too many;
// that one is left to the scalar way, which tells them apart.
double residual_whole_groups(const SignsPass& pass, SignsOut& out, size_t n) {
  const auto threshold = hn::Set(I32(), out.threshold.magnitude);
  const auto below_threshold = hn::Set(I32(), out.threshold.magnitude - 1);
  double squares = 0;
  for (size_t first = 0; first < n; first += kSquaresGroup) {
    if (out.threshold.ties == 0) {
      squares += residual_group<false>(pass, out, first, threshold, n).squares;
      continue;
    }
    HWY_ALIGN std::array<base::Bf16, kSquaresGroup>
        gradient;  // whose place may be the new residual's
    std::memcpy(static_cast<void*>(gradient.data()), pass.gradient + first, sizeof(gradient));
    const ResidualGroup group = residual_group<true>(pass, out, first, below_threshold, n);
    if (group.ties <= out.threshold.ties) {
      out.threshold.ties -= group.ties;
      squares += group.squares;
      continue;
    }
    SignsPass again = pass.from(first);
    again.gradient = gradient.data();
    SignsOut one_by_one = out.from(first);
    squares += scalar_signs().residual(again, one_by_one, kSquaresGroup);
    out.threshold.ties = 0;
  }
  return squares;
}

double residual(const SignsPass& pass, SignsOut& out, size_t n) {
  const size_t whole = n - n % kSquaresGroup;
  const double total = residual_whole_groups(pass, out, whole);
  if (whole == n) return total;
  SignsOut end = out.from(whole);
  return total + scalar_signs().residual(pass.from(whole), end, n - whole);
}

// Always kAtOnce of a word, so that nearly all branches are foreseen; beyond the last one lies
// anything, which the next ones write over.
size_t ends(const uint64_t* sent, const uint64_t* negative, size_t words, uint32_t* ends) {
  constexpr size_t kAtOnce = 8;
  static_assert(kEndSlack >= kAtOnce);
  size_t found = 0;
  for (size_t w = 0; w < words; ++w) {
    uint64_t left = sent[w];
    const uint64_t signs = negative[w];
    const auto first = static_cast<uint32_t>(w * kWordBits + 1);
    const auto count = static_cast<size_t>(std::popcount(left));
    for (size_t done = 0; done == 0 || done < count; done += kAtOnce) {
      for (size_t i = done; i < done + kAtOnce; ++i, left &= left - 1) {
        const auto at = static_cast<uint32_t>(std::countr_zero(left)) % kWordBits;
        ends[found + i] = static_cast<uint32_t>(first + at) | static_cast<uint32_t>(signs >> at)
                                                                  << 31;
      }
    }
    found += count;
  }
  return found;
}

void split(const GapsToSplit& gaps, uint64_t* tails, uint64_t* highs, uint64_t* high_bits) {
  using U64 = hn::RepartitionToWide<U32>;
  const size_t lanes = hn::Lanes(U64());
  const auto low_bits = static_cast<int>(gaps.low_bits);
  const auto place = hn::Set(U32(), kEndMask);
  const auto one = hn::Set(U32(), 1);
  const auto low_mask = hn::Set(U32(), (1u << gaps.low_bits) - 1);
  const auto sign_mask = hn::Set(U32(), gaps.sign_bits > 0 ? ~0u : 0u);
  const auto too_long = hn::Set(U32(), kHighBitsMax + 1);
  const auto most = hn::Set(U32(), 31);  // that a lane can be shifted by
  const auto lower = hn::Set(U64(), 0xffffffffu);
  const auto tail_bits = static_cast<int>(gaps.low_bits + gaps.sign_bits);
  size_t p = 0;
  for (; p + lanes <= gaps.pairs; p += lanes) {
    const auto end = hn::LoadU(U32(), gaps.ends + 2 * p + 1);
    const auto before = hn::And(hn::LoadU(U32(), gaps.ends + 2 * p), place);
    const auto gap = hn::Sub(hn::Sub(hn::And(end, place), before), one);
    const auto sign = hn::And(hn::ShiftRight<31>(end), sign_mask);
    const auto tail =
        hn::BitCast(U64(), hn::Or(hn::And(gap, low_mask), hn::ShiftLeftSame(sign, low_bits)));
    const auto zeros = hn::ShiftRightSame(gap, low_bits);
    const auto length = hn::Add(zeros, one);
    const auto fits = hn::VecFromMask(U32(), hn::Lt(length, too_long));
    const auto high = hn::BitCast(U64(), hn::Shl(one, hn::Min(zeros, most)));
    // The first of each pair is in the lower half of a lane.
    const auto lengths = hn::BitCast(U64(), hn::And(length, fits));
    const auto first_length = hn::And(lengths, lower);
    const auto both_fit = hn::Eq(hn::BitCast(U64(), fits), hn::Set(U64(), ~uint64_t{0}));
    const auto both = [&](hn::Vec<U64> halves, hn::Vec<U64> second)
                          HWY_ATTR { return hn::Or(hn::And(halves, lower), second); };
    hn::StoreU(both(tail, hn::ShiftLeftSame(hn::ShiftRight<32>(tail), tail_bits)), U64(),
               tails + p);
    hn::StoreU(both(high, hn::Shl(hn::ShiftRight<32>(high), first_length)), U64(), highs + p);
    hn::StoreU(hn::IfThenElseZero(both_fit, hn::Add(first_length, hn::ShiftRight<32>(lengths))),
               U64(), high_bits + p);
  }
  scalar_signs().split(gaps.from(p), tails + p, highs + p, high_bits + p);
}

SignKernels sign_kernels() {
  return {.collect = collect,
          .largest = largest,
          .sum_above = sum_above,
          .residual = residual,
          .ends = ends,
          .split = split};
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
#endif  // HWY_TARGET != HWY_SCALAR
HWY_AFTER_NAMESPACE();
