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

}  // namespace

const SelectionKernels& scalar_selection() {
  static constexpr SelectionKernels kKernels{.count_digits = count_digits, .collect = collect};
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

void scatter_add(std::span<const uint32_t> indices, std::span<const float> values,
                 std::span<float> out) {
  SI_CHECK(indices.size() == values.size(), "as many indices as values");
  for (size_t i = 0; i < indices.size(); ++i) {
    SI_CHECK(indices[i] < out.size(), "an index beyond the subgroup");
    out[indices[i]] += values[i];
  }
}

}  // namespace smartinf::kernels
