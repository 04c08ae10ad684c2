// What each instruction set implements of the selection. The search for the threshold is written
// once, in selection.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smartinf::kernels {

/// A magnitude is the 31 lower bits of an f32 as a number: ordered as the values are.
inline constexpr int32_t kMagnitudeMax = 0x7fffffff;

/// Which magnitudes a histogram looks at, and by which of their bits it sorts them.
struct DigitOfMagnitude {
  int32_t lowest = 0;
  int32_t highest = kMagnitudeMax;
  int shift = 0;  // counts[(magnitude >> shift) & mask] goes up
  int32_t mask = 0;
};
inline constexpr size_t kDigitValuesMax = size_t{1} << 13;

/// Every magnitude above `border` is taken, and the first `ties` that are equal to it.
struct Border {
  int32_t magnitude = -1;
  size_t ties = 0;
};

struct SelectionKernels {
  /// Adds to counts: [digit.mask + 1].
  void (*count_digits)(const float* in, size_t n, const DigitOfMagnitude& digit, uint32_t* counts);
  /// Writes index and value of what `border` takes, ascending. Exactly k elements qualify.
  void (*collect)(const float* in, size_t n, Border border, size_t k, uint32_t* indices,
                  float* values);
  /// Writes index and value of every magnitude from `lowest` on, ascending. Returns how many; or
  /// `room`, when there may be no room for all: then what was written means nothing.
  /// Shapes: indices, values: [room].
  size_t (*collect_from)(const float* in, size_t n, int32_t lowest, size_t room, uint32_t* indices,
                         float* values);
};

const SelectionKernels& scalar_selection();

}  // namespace smartinf::kernels
