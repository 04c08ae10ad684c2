#include "smartinf/kernels/selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "smartinf/base/check.h"
#include "smartinf/kernels/state_codec.h"

namespace smartinf::kernels {
namespace {

int32_t magnitude_of(float value) {
  return static_cast<int32_t>(std::bit_cast<uint32_t>(value) & kMagnitudeMask);
}

void count_digits(const float* in, size_t n, const DigitOfMagnitude& digit, uint32_t* counts) {
  for (size_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<uint32_t>(magnitude_of(in[i]));
    if ((magnitude >> digit.prefix_shift) == digit.prefix) {
      ++counts[(magnitude >> digit.shift) & digit.mask];
    }
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

/// Narrows the border down digit by digit. 0 < k < n.
Border find_border(const SelectionKernels& kernels, std::span<const float> in, size_t k) {
  std::array<uint32_t, kDigitValuesMax> counts;
  size_t needed = k;
  uint32_t prefix = 0;
  int prefix_shift = 31;
  for (const int shift : {18, 5, 0}) {
    const uint32_t mask = (1u << (prefix_shift - shift)) - 1;
    std::fill_n(counts.begin(), mask + 1, 0u);
    kernels.count_digits(
        in.data(), in.size(),
        {.prefix = prefix, .prefix_shift = prefix_shift, .shift = shift, .mask = mask},
        counts.data());
    uint32_t digit = mask;
    while (counts[digit] < needed) needed -= counts[digit--];
    prefix = prefix_shift == 31 ? digit : (prefix << (prefix_shift - shift)) | digit;
    prefix_shift = shift;
    // The whole bin is taken: the border lies just below it.
    if (counts[digit] == needed) return {static_cast<int32_t>(prefix << shift) - 1, 0};
  }
  return {static_cast<int32_t>(prefix), needed};
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
  const Border border = k < in.size() ? find_border(kernels, in, k) : Border{};
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
