// The selection as one Highway body for every instruction set.
#include <array>
#include <bit>
#include <cstring>

#include "smartinf/kernels/selection_kernels.h"
#include "smartinf/kernels/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "smartinf/kernels/selection_simd.cc"
#include <hwy/foreach_target.h>  // must precede highway.h
#include <hwy/highway.h>

#include "smartinf/kernels/candidates-inl.h"

HWY_BEFORE_NAMESPACE();
namespace smartinf::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

SelectionKernels selection_kernels();

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;

HWY_INLINE hn::Vec<I32> magnitudes(const float* in) {
  return hn::BitCast(I32(), hn::Abs(hn::LoadU(F32(), in)));
}

// Four histograms, so that equal digits in a row do not wait for each other's count.
void count_all_digits(const float* in, size_t n, const DigitOfMagnitude& digit, uint32_t* counts) {
  constexpr size_t kTables = 4;
  std::array<std::array<uint32_t, kDigitValuesMax>, kTables> tables;
  for (auto& table : tables)
    std::memset(table.data(), 0, static_cast<size_t>(digit.mask + 1) * sizeof(uint32_t));
  size_t i = 0;
  for (; i + kTables <= n; i += kTables) {
    for (size_t t = 0; t < kTables; ++t) {
      ++tables[t][(magnitude_of(in[i + t]) >> digit.shift) & digit.mask];
    }
  }
  for (; i < n; ++i) ++tables[0][(magnitude_of(in[i]) >> digit.shift) & digit.mask];
  for (size_t d = 0; d <= static_cast<size_t>(digit.mask); ++d) {
    for (const auto& table : tables) counts[d] += table[d];
  }
}

void count_digits(const float* in, size_t n, const DigitOfMagnitude& digit, uint32_t* counts) {
  if (digit.lowest == 0 && digit.highest == kMagnitudeMax) {
    count_all_digits(in, n, digit, counts);
    return;
  }
  // Few magnitudes are inside: vectors without one are passed over.
  const size_t lanes = hn::Lanes(I32());
  const auto lowest = hn::Set(I32(), digit.lowest - 1);
  const auto highest = hn::Set(I32(), digit.highest);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto magnitude = magnitudes(in + i);
    const auto inside = hn::AndNot(hn::Gt(magnitude, highest), hn::Gt(magnitude, lowest));
    if (hn::AllFalse(I32(), inside)) continue;
    for (uint64_t left = bits_of_mask(I32(), inside); left != 0; left &= left - 1) {
      const auto lane = static_cast<size_t>(std::countr_zero(left));
      ++counts[(magnitude_of(in[i + lane]) >> digit.shift) & digit.mask];
    }
  }
  if (i < n) scalar_selection().count_digits(in + i, n - i, digit, counts);
}

// Collects one element, for what a vector cannot do: ties, and the ends of input and output.
HWY_INLINE void collect_one(const float* in, size_t i, Threshold& threshold, size_t& taken,
                            uint32_t* indices, float* values) {
  const auto magnitude = magnitude_of(in[i]);
  if (magnitude < threshold.magnitude) return;
  if (magnitude == threshold.magnitude) {
    if (threshold.ties == 0) return;
    --threshold.ties;
  }
  indices[taken] = static_cast<uint32_t>(i);
  values[taken] = in[i];
  ++taken;
}

void collect(const float* in, size_t n, Threshold threshold, size_t k, uint32_t* indices,
             float* values) {
  const size_t lanes = hn::Lanes(I32());
  const auto threshold_lanes = hn::Set(I32(), threshold.magnitude);
  size_t taken = 0;
  size_t i = 0;
  for (; i + lanes <= n && taken < k; i += lanes) {
    const auto magnitude = magnitudes(in + i);
    const auto above = hn::Gt(magnitude, threshold_lanes);
    const bool has_tie =
        threshold.ties > 0 && !hn::AllFalse(I32(), hn::Eq(magnitude, threshold_lanes));
    // A compressed store writes a whole vector, which must not pass the end of the output.
    if (!has_tie && taken + lanes <= k) {
      if (hn::AllFalse(I32(), above)) continue;
      const auto index = hn::Iota(U32(), static_cast<uint32_t>(i));
      hn::CompressStore(hn::LoadU(F32(), in + i), hn::RebindMask(F32(), above), F32(),
                        values + taken);
      taken += hn::CompressStore(index, hn::RebindMask(U32(), above), U32(), indices + taken);
      continue;
    }
    for (size_t e = i; e < i + lanes; ++e) collect_one(in, e, threshold, taken, indices, values);
  }
  for (; i < n && taken < k; ++i) collect_one(in, i, threshold, taken, indices, values);
}

// Few qualify.
size_t collect_from(const float* in, size_t n, int32_t lowest, size_t room, uint32_t* indices,
                    float* values) {
  constexpr size_t kGroup = kCandidateGroup;
  const size_t lanes = hn::Lanes(I32());
  const auto below = hn::Set(I32(), lowest - 1);
  size_t taken = 0;
  size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    uint64_t left = 0;
    for (size_t v = 0; v < kGroup; v += lanes) {
      left |= bits_of_mask(I32(), hn::Gt(magnitudes(in + i + v), below)) << v;
    }
    if (room - taken <= kGroup) return room;
    taken += put_candidates<4>(
        left, i, [&](size_t at) { return in[i + at]; }, indices + taken, values + taken);
  }
  if (room - taken <= n - i) return room;
  for (; i < n; ++i) {
    if (magnitude_of(in[i]) < lowest) continue;
    indices[taken] = static_cast<uint32_t>(i);
    values[taken] = in[i];
    ++taken;
  }
  return taken;
}

CountsAbove count_above(const float* in, size_t n, const Thresholds& thresholds) {
  const size_t lanes = hn::Lanes(F32());
  hn::Vec<I32> counts[kThresholdsAtOnce];
  hn::Vec<I32> threshold[kThresholdsAtOnce];
  for (size_t b = 0; b < kThresholdsAtOnce; ++b) {
    counts[b] = hn::Zero(I32());
    threshold[b] = hn::Set(I32(), thresholds[b]);
  }
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto magnitude = magnitudes(in + i);
    for (size_t b = 0; b < kThresholdsAtOnce; ++b) {
      counts[b] = hn::Sub(counts[b], hn::VecFromMask(I32(), hn::Gt(magnitude, threshold[b])));
    }
  }
  CountsAbove above = scalar_selection().count_above(in + i, n - i, thresholds);
  for (size_t b = 0; b < kThresholdsAtOnce; ++b) {
    above[b] += static_cast<uint32_t>(hn::GetLane(hn::SumOfLanes(I32(), counts[b])));
  }
  return above;
}

size_t between(const float* in, size_t n, int32_t low, int32_t high, float* out) {
  const size_t lanes = hn::Lanes(F32());
  const auto lowest = hn::Set(I32(), low);
  const auto highest = hn::Set(I32(), high);
  size_t found = 0;
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto value = hn::LoadU(F32(), in + i);
    const auto magnitude = hn::BitCast(I32(), hn::Abs(value));
    const auto inside = hn::AndNot(hn::Gt(magnitude, highest), hn::Gt(magnitude, lowest));
    found += put_compressed(F32(), value, hn::RebindMask(F32(), inside), out + found);
  }
  return found + scalar_selection().between(in + i, n - i, low, high, out + found);
}

SelectionKernels selection_kernels() {
  return {.count_digits = count_digits,
          .collect = collect,
          .collect_from = collect_from,
          .count_above = count_above,
          .between = between};
}

}  // namespace HWY_NAMESPACE
}  // namespace smartinf::kernels
HWY_AFTER_NAMESPACE();
