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

int32_t magnitude_of(float value) {
  return static_cast<int32_t>(std::bit_cast<uint32_t>(value) & kMagnitudeMask);
}

void count_digits(const float* in, size_t n, const DigitOfMagnitude& digit, uint32_t* counts) {
  for (size_t i = 0; i < n; ++i) {
    const int32_t magnitude = magnitude_of(in[i]);
    if (magnitude < digit.lowest || magnitude > digit.highest) continue;
    ++counts[(magnitude >> digit.shift) & digit.mask];
  }
}

void collect(const float* in, size_t n, Border border, size_t k, uint32_t* indices, float* values) {
  size_t taken = 0;
  for (size_t i = 0; i < n && taken < k; ++i) {
    const int32_t magnitude = magnitude_of(in[i]);
    if (magnitude < border.magnitude) continue;
    if (magnitude == border.magnitude) {
      if (border.ties == 0) continue;
      --border.ties;
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

float finite_border(int32_t magnitude) {
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

/// Narrows the border down digit by digit. 0 < k < n. Empty when fewer than k elements have at
/// least the magnitude `lowest`.
std::optional<Border> find_border(const SelectionKernels& kernels, std::span<const float> in,
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
    // All of this digit is taken: the border lies just below it.
    if (counts[digit] == needed) return Border{lowest - 1, 0};
  }
  return Border{lowest, needed};
}

/// As above, without fail.
Border border_of(const SelectionKernels& kernels, std::span<const float> in, size_t k) {
  std::optional<Border> border = find_border(kernels, in, k, guess_lowest(in, k));
  if (!border) border = find_border(kernels, in, k, 0);
  return *border;
}

constexpr size_t kCandidatesMax = 16384;  // a quarter of a block

/// The border of the k largest of a few, none of which is smaller than `lowest`. 0 < k <= n.
Border border_of_candidates(std::span<const float> candidates, size_t k, int32_t lowest) {
  // 256 buckets for each power of two. What lies far above the border needs no order.
  constexpr int kShift = 15;
  constexpr int32_t kBuckets = 1024;
  std::array<uint16_t, kBuckets> counts{};
  std::array<uint16_t, kCandidatesMax> buckets;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const int32_t bucket = std::min((magnitude_of(candidates[i]) - lowest) >> kShift, kBuckets - 1);
    buckets[i] = static_cast<uint16_t>(bucket);
    ++counts[static_cast<size_t>(bucket)];
  }
  size_t needed = k;
  size_t bucket = kBuckets - 1;
  while (counts[bucket] < needed) needed -= counts[bucket--];
  std::array<int32_t, kCandidatesMax> inside;
  size_t count = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    inside[count] = magnitude_of(candidates[i]);
    count += buckets[i] == bucket ? 1 : 0;
  }
  const auto nth = inside.begin() + static_cast<ptrdiff_t>(needed - 1);
  std::nth_element(inside.begin(), nth, inside.begin() + static_cast<ptrdiff_t>(count),
                   std::greater<>());
  return {*nth, static_cast<size_t>(std::count(inside.begin(), nth + 1, *nth))};
}

/// Moves what the border takes to the front; returns how many.
size_t keep_candidates(Border border, size_t count, uint32_t* indices, float* values) {
  size_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t magnitude = magnitude_of(values[i]);
    const bool tie = magnitude == border.magnitude && border.ties > 0;
    border.ties -= tie ? 1 : 0;
    indices[taken] = indices[i];
    values[taken] = values[i];
    taken += magnitude > border.magnitude || tie ? 1 : 0;
  }
  return taken;
}

}  // namespace

const SelectionKernels& scalar_selection() {
  static constexpr SelectionKernels kKernels{
      .count_digits = count_digits, .collect = collect, .collect_from = collect_from};
  return kKernels;
}

size_t top_k(const KernelTable& table, std::span<const float> in, size_t k, uint32_t* indices,
             float* values) {
  SI_CHECK(in.size() <= std::numeric_limits<uint32_t>::max(), "indices have 32 bits");
  k = std::min(k, in.size());
  if (k == 0) return 0;
  const SelectionKernels& kernels = table.tiles().selection;
  const Border border = k < in.size() ? border_of(kernels, in, k) : Border{};
  kernels.collect(in.data(), in.size(), border, k, indices, values);
  return k;
}

size_t top_k_near(const KernelTable& table, std::span<const float> in, size_t k, size_t room,
                  uint32_t* indices, float* values, float& border) {
  SI_CHECK(room >= std::min(k, in.size()), "room for what is found");
  SI_CHECK(in.size() <= std::numeric_limits<uint32_t>::max(), "indices have 32 bits");
  if (k == 0) return 0;
  if (const auto candidates = candidates_near(border, k, std::min(room, in.size()))) {
    const size_t found = table.tiles().selection.collect_from(
        in.data(), in.size(), candidates->lowest, candidates->room, indices, values);
    const auto taken = top_k_of_candidates(*candidates, found, k, indices, values, border);
    if (taken) return *taken;
  }
  const size_t taken = top_k(table, in, k, indices, values);
  int32_t least = taken > 0 ? kMagnitudeMax : 0;
  for (size_t i = 0; i < taken; ++i) least = std::min(least, magnitude_of(values[i]));
  border = finite_border(least);
  return taken;
}

std::optional<Candidates> candidates_near(float border, size_t k, size_t room) {
  constexpr float kNear = 0.9f;
  room = std::min(room, kCandidatesMax);
  if (!(border > 0) || k >= room) return std::nullopt;
  return Candidates{.lowest = magnitude_of(kNear * border), .room = room};
}

std::optional<size_t> top_k_of_candidates(const Candidates& candidates, size_t found, size_t k,
                                          uint32_t* indices, float* values, float& border) {
  if (found < k || found >= candidates.room) return std::nullopt;  // there may be more above it
  const Border exact = border_of_candidates({values, found}, k, candidates.lowest);
  border = finite_border(exact.magnitude);
  return keep_candidates(exact, found, indices, values);
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
