// What each instruction set implements of the selection. The search for the threshold is written
// once, in selection.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smartinf::kernels {

/// Which magnitudes a histogram looks at, and by which of their bits it sorts them. A magnitude is
/// the 31 lower bits of an f32: ordered as the numbers are.
struct DigitOfMagnitude {
  uint32_t prefix = 0;    // only magnitudes with (magnitude >> prefix_shift) == prefix...
  int prefix_shift = 31;  // ...31: all of them
  int shift = 0;          // counts[(magnitude >> shift) & mask] goes up
  uint32_t mask = 0;
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
};

const SelectionKernels& scalar_selection();

}  // namespace smartinf::kernels
