// Kernels of the selection, one set for each instruction set. The search for the threshold is
// written once, in selection.cc.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "smartinf/kernels/state_codec.h"

namespace smartinf::kernels {

/// A magnitude is the 31 lower bits of an f32 as a number: ordered as the values are.
inline constexpr int32_t kMagnitudeMax = 0x7fffffff;
inline int32_t magnitude_of(float value) {
  return static_cast<int32_t>(std::bit_cast<uint32_t>(value) & kMagnitudeMask);
}

/// Which magnitudes a histogram looks at, and by which of their bits it sorts them.
struct DigitOfMagnitude {
  int32_t lowest = 0;
  int32_t highest = kMagnitudeMax;
  int shift = 0;  // counts[(magnitude >> shift) & mask] goes up
  int32_t mask = 0;
};
inline constexpr size_t kDigitValuesMax = size_t{1} << 13;

/// Every magnitude above `threshold` is taken, and the first `ties` that are equal to it.
struct Threshold {
  int32_t magnitude = -1;
  size_t ties = 0;
};
/// Magnitude of the smallest that is taken, where the threshold is threshold_among()'s.
inline int32_t kth_magnitude(const Threshold& threshold) {
  return threshold.ties > 0 ? threshold.magnitude : threshold.magnitude + 1;
}

/// Thresholds that are tried at once.
inline constexpr size_t kThresholdsAtOnce = 8;
using Thresholds = std::array<int32_t, kThresholdsAtOnce>;
using CountsAbove = std::array<uint32_t, kThresholdsAtOnce>;

struct SelectionKernels {
  /// Adds to counts: [digit.mask + 1].
  void (*count_digits)(const float* in, size_t n, const DigitOfMagnitude& digit, uint32_t* counts);
  /// Writes index and value of what `threshold` takes, ascending. Exactly k elements qualify.
  void (*collect)(const float* in, size_t n, Threshold threshold, size_t k, uint32_t* indices,
                  float* values);
  /// Writes index and value of every magnitude from `lowest` on, ascending. Returns how many; or
  /// `room`, when there may be no room for all: then what was written means nothing.
  /// Shapes: indices, values: [room].
  size_t (*collect_from)(const float* in, size_t n, int32_t lowest, size_t room, uint32_t* indices,
                         float* values);
  /// How many magnitudes are above each threshold.
  CountsAbove (*count_above)(const float* in, size_t n, const Thresholds& thresholds);
  /// Writes the elements with magnitudes above `low` and at most `high`, in any order. Returns how
  /// many.
  /// Shapes: out: [n], may be `in`.
  size_t (*between)(const float* in, size_t n, int32_t low, int32_t high, float* out);
};

const SelectionKernels& scalar_selection();

/// The k-th largest magnitude of a few, all above `low`; likely near `near`. 0 < k <= n. No ties
/// where all that are as large are taken. Shapes: spare: [n]. Threads: safe on disjoint `spare`.
Threshold threshold_among(const SelectionKernels& kernels, std::span<const float> in, size_t k,
                          int32_t low, int32_t near, std::span<float> spare);

}  // namespace smartinf::kernels
