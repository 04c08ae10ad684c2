// A sum whose rounding depends on the number of its terms alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace smartinf::kernels {

/// Adds terms pairwise as a binary counter carries, so the shape of the tree depends on their
/// number only. Sums of 2^k terms each, and at the end one of what is left over, may be added in
/// place of the terms themselves: the total has the same bits.
class PairwiseSum {
 public:
  void add(double term) {
    for (uint64_t carry = terms_; (carry & 1) != 0; carry >>= 1) term = levels_[--depth_] + term;
    levels_[depth_++] = term;
    ++terms_;
  }
  double total() const {
    double sum = 0;
    for (size_t i = depth_; i > 0; --i) sum = levels_[i - 1] + sum;
    return sum;
  }

 private:
  std::array<double, 64> levels_{};
  size_t depth_ = 0;
  uint64_t terms_ = 0;
};

}  // namespace smartinf::kernels
