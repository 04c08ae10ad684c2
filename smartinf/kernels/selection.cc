#include "smartinf/kernels/selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "smartinf/base/check.h"
#include "smartinf/kernels/state_codec.h"

namespace smartinf::kernels {
namespace {

void count_digits(const float* in, size_t n, const DigitOfMagnitude& digit, uint32_t* counts) {
  for (size_t i = 0; i < n; ++i) {
    const int32_t magnitude = magnitude_of(in[i]);
    if (magnitude < digit.lowest || magnitude > digit.highest) continue;
    ++counts[(magnitude >> digit.shift) & digit.mask];
  }
}

void collect(const float* in, size_t n, Threshold threshold, size_t k, uint32_t* indices,
             float* values) {
  size_t taken = 0;
  for (size_t i = 0; i < n && taken < k; ++i) {
    const int32_t magnitude = magnitude_of(in[i]);
    if (magnitude < threshold.magnitude) continue;
    if (magnitude == threshold.magnitude) {
      if (threshold.ties == 0) continue;
      --threshold.ties;
    }
    indices[taken] = static_cast<uint32_t>(i);
    values[taken] = in[i];
    ++taken;
  }
}

size_t collect_from(const float* in, size_t n, int32_t lowest, size_t room, uint32_t* indices,
                    float* values) {
  size_t taken = 0;
  for (size_t i = 0; i < n && taken < room; ++i) {
    if (magnitude_of(in[i]) < lowest) continue;
    indices[taken] = static_cast<uint32_t>(i);
    values[taken] = in[i];
    ++taken;
  }
  return taken;
}

CountsAbove count_above(const float* in, size_t n, const Thresholds& thresholds) {
  CountsAbove counts{};
  for (size_t i = 0; i < n; ++i) {
    for (size_t b = 0; b < thresholds.size(); ++b) {
      counts[b] += magnitude_of(in[i]) > thresholds[b] ? 1 : 0;
    }
  }
  return counts;
}

size_t between(const float* in, size_t n, int32_t low, int32_t high, float* out) {
  size_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    const int32_t magnitude = magnitude_of(in[i]);
    if (magnitude > low && magnitude <= high) out[found++] = in[i];
  }
  return found;
}

float finite_threshold(int32_t magnitude) {
  const auto value = std::bit_cast<float>(magnitude);
  return std::isfinite(value) ? value : 0;
}

constexpr std::array kShifts = {18, 5, 0};  // digits of 13, 13 and 5 bits

/// A magnitude that is very likely at or below the k-th largest, so that the first histogram can
/// pass over nearly all elements; 0 where that would not help. The start of a first digit.
int32_t guess_lowest(std::span<const float> in, size_t k) {
  constexpr size_t kSamples = 4096;
  if (in.size() < 16 * kSamples) return 0;
  // A quarter more than expected, and six standard deviations of a small expectation.
  const double expected = static_cast<double>(k) / static_cast<double>(in.size()) * kSamples;
  const auto rank = static_cast<size_t>(1.25 * expected + 6 * std::sqrt(expected) + 6);
  if (rank > kSamples / 4) return 0;
  std::array<int32_t, kSamples> samples;
  for (size_t i = 0; i < kSamples; ++i) samples[i] = magnitude_of(in[in.size() / kSamples * i]);
  std::nth_element(samples.begin(), samples.begin() + static_cast<ptrdiff_t>(rank), samples.end(),
                   std::greater<>());
  return samples[rank] >> kShifts[0] << kShifts[0];
}

/// Narrows the threshold down digit by digit. 0 < k < n. Empty when fewer than k elements have at
/// least the magnitude `lowest`.
std::optional<Threshold> find_threshold(const SelectionKernels& kernels, std::span<const float> in,
                                        size_t k, int32_t lowest) {
  std::array<uint32_t, kDigitValuesMax> counts;
  size_t needed = k;
  int32_t highest = kMagnitudeMax;
  int upper_shift = 31;
  for (const int shift : kShifts) {
    const auto mask = static_cast<int32_t>((1u << (upper_shift - shift)) - 1);
    std::fill_n(counts.begin(), mask + 1, 0u);
    kernels.count_digits(in.data(), in.size(),
                         {.lowest = lowest, .highest = highest, .shift = shift, .mask = mask},
                         counts.data());
    size_t digit = static_cast<size_t>(mask);
    while (counts[digit] < needed) {
      if (digit == 0) return std::nullopt;
      needed -= counts[digit--];
    }
    if (upper_shift == 31) lowest = 0;
    lowest += static_cast<int32_t>(digit << shift);
    highest = lowest + static_cast<int32_t>((1u << shift) - 1);
    upper_shift = shift;
    // All of this digit is taken: the threshold lies just below it.
    if (counts[digit] == needed) return Threshold{lowest - 1, 0};
  }
  return Threshold{lowest, needed};
}

/// As above, without fail.
Threshold threshold_of(const SelectionKernels& kernels, std::span<const float> in, size_t k) {
  std::optional<Threshold> threshold = find_threshold(kernels, in, k, guess_lowest(in, k));
  if (!threshold) threshold = find_threshold(kernels, in, k, 0);
  return *threshold;
}

constexpr size_t kCandidatesMax = 16384;  // a quarter of a block

/// Moves what the threshold takes to the front; returns how many.
size_t keep_candidates(Threshold threshold, size_t count, uint32_t* indices, float* values) {
  size_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t magnitude = magnitude_of(values[i]);
    const bool tie = magnitude == threshold.magnitude && threshold.ties > 0;
    threshold.ties -= tie ? 1 : 0;
    indices[taken] = indices[i];
    values[taken] = values[i];
    taken += magnitude > threshold.magnitude || tie ? 1 : 0;
  }
  return taken;
}

}  // namespace

const SelectionKernels& scalar_selection() {
  static constexpr SelectionKernels kKernels{.count_digits = count_digits,
                                             .collect = collect,
                                             .collect_from = collect_from,
                                             .count_above = count_above,
                                             .between = between};
  return kKernels;
}

Threshold threshold_among(const SelectionKernels& kernels, std::span<const float> in, size_t k,
                          int32_t low, int32_t near, std::span<float> spare) {
  constexpr size_t kFew = 256;
  constexpr int32_t kPercent = 1 << 17;  // of a magnitude, about
  constexpr std::array<int32_t, kThresholdsAtOnce> kNear = {-8, -4, -2, 0, 2, 4, 8, 16};
  SI_CHECK(k > 0 && k <= in.size() && spare.size() >= in.size(), "k of a few, and room for them");
  // The threshold is above `low` and at most `high`, and so are the magnitudes that are left.
  int32_t high = kMagnitudeMax;
  for (bool first = true; in.size() > kFew && int64_t{high} - low > 1; first = false) {
    Thresholds thresholds;
    for (size_t b = 0; b < kThresholdsAtOnce; ++b) {
      const int64_t even = (int64_t{high} - low) * static_cast<int64_t>(b + 1);
      thresholds[b] = first ? std::clamp(near + kNear[b] * kPercent, low, high)
                            : low + static_cast<int32_t>(even / (kThresholdsAtOnce + 1));
    }
    const CountsAbove above = kernels.count_above(in.data(), in.size(), thresholds);
    size_t b = 0;
    while (b < kThresholdsAtOnce && above[b] >= k) low = thresholds[b++];
    if (b < kThresholdsAtOnce) {
      high = thresholds[b];
      k -= above[b];
    }
    in = {spare.data(), kernels.between(in.data(), in.size(), low, high, spare.data())};
  }
  if (in.data() != spare.data()) std::copy(in.begin(), in.end(), spare.begin());
  const auto left = spare.first(in.size());
  const auto nth = left.begin() + static_cast<ptrdiff_t>(k - 1);
  std::nth_element(left.begin(), nth, left.end(),
                   [](float a, float b) { return magnitude_of(a) > magnitude_of(b); });
  const int32_t threshold = magnitude_of(*nth);
  const auto is_tie = [&](float value) { return magnitude_of(value) == threshold; };
  // All as large as the threshold are taken: it lies just below them, and none need be counted.
  if (std::none_of(nth + 1, left.end(), is_tie)) return {threshold - 1, 0};
  return {threshold, static_cast<size_t>(std::count_if(left.begin(), nth + 1, is_tie))};
}

size_t top_k(const KernelTable& table, std::span<const float> in, size_t k, uint32_t* indices,
             float* values) {
  SI_CHECK(in.size() <= std::numeric_limits<uint32_t>::max(), "indices have 32 bits");
  k = std::min(k, in.size());
  if (k == 0) return 0;
  const SelectionKernels& kernels = table.tiles().selection;
  const Threshold threshold = k < in.size() ? threshold_of(kernels, in, k) : Threshold{};
  kernels.collect(in.data(), in.size(), threshold, k, indices, values);
  return k;
}

size_t top_k_near(const KernelTable& table, std::span<const float> in, size_t k, size_t room,
                  uint32_t* indices, float* values, float& threshold) {
  SI_CHECK(room >= std::min(k, in.size()), "room for what is found");
  SI_CHECK(in.size() <= std::numeric_limits<uint32_t>::max(), "indices have 32 bits");
  if (k == 0) return 0;
  constexpr float kNear = 0.9f;
  const size_t candidates_max = std::min({room, in.size(), kCandidatesMax});
  if (threshold > 0 && k < candidates_max) {
    const int32_t lowest = magnitude_of(kNear * threshold);
    const SelectionKernels& kernels = table.tiles().selection;
    const size_t found =
        kernels.collect_from(in.data(), in.size(), lowest, candidates_max, indices, values);
    // Where all the room is used there may be more elements.
    if (found >= k && found < candidates_max) {
      std::array<float, kCandidatesMax> spare;
      const Threshold exact =
          threshold_among(kernels, {values, found}, k, lowest - 1, magnitude_of(threshold), spare);
      threshold = finite_threshold(kth_magnitude(exact));
      return keep_candidates(exact, found, indices, values);
    }
  }
  const size_t taken = top_k(table, in, k, indices, values);
  int32_t least = taken > 0 ? kMagnitudeMax : 0;
  for (size_t i = 0; i < taken; ++i) least = std::min(least, magnitude_of(values[i]));
  threshold = finite_threshold(least);
  return taken;
}

void scatter_add(std::span<const uint32_t> indices, std::span<const float> values,
                 std::span<float> out) {
  SI_CHECK(indices.size() == values.size(), "as many indices as values");
  for (size_t i = 0; i < indices.size(); ++i) {
    SI_CHECK(indices[i] < out.size(), "an index beyond the subgroup");
    out[indices[i]] += values[i];
  }
}

}  // namespace smartinf::kernels
