// Kernels for blocks that send signs, one set for each instruction set. The public side is signs.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "smartinf/base/float_formats.h"
#include "smartinf/kernels/feedback_kernels.h"
#include "smartinf/kernels/selection_kernels.h"

namespace smartinf::kernels {

/// Input of both passes, n elements. element: a multiple of kSquaresGroup.
struct SignsPass {
  const base::Bf16* gradient = nullptr;
  const base::Bf16* residual = nullptr;
  float scale = 1;
  size_t fetch = 0;  // elements behind these that will be read next

  /// The pass over the elements from i on.
  SignsPass from(size_t i) const {
    SignsPass rest = *this;
    rest.gradient += i;
    rest.residual += i;
    return rest;
  }
};

inline constexpr int32_t kLargestBf16 = 0x7f7f;

/// Output of the second pass.
struct SignsOut {
  uint64_t element = 0;                // the first one's place in the parameter space
  uint64_t rounding_seed = 0;          // as in state_codec.h
  Threshold threshold;                 // of what is sent; ties are used up
  float magnitude = 0;                 // the magnitude that is sent for all
  base::Bf16* new_residual = nullptr;  // [n]
  uint64_t* sent = nullptr;            // [divide_up(n, 64)]
  uint64_t* negative = nullptr;

  /// The output of the elements from i on, a multiple of kSquaresGroup.
  SignsOut from(size_t i) const {
    SignsOut rest = *this;
    rest.element += i;
    rest.new_residual += i;
    rest.sent += i / 64;
    rest.negative += i / 64;
    return rest;
  }
};

/// Input of split().
struct GapsToSplit {
  const uint32_t* ends = nullptr;  // [2 * pairs + 1]
  size_t pairs = 0;
  unsigned low_bits = 0;
  unsigned sign_bits = 0;

  GapsToSplit from(size_t pair) const {
    return {ends + 2 * pair, pairs - pair, low_bits, sign_bits};
  }
};

struct SignKernels {
  /// Writes |scale * gradient + residual| of every element of which that is at
  /// least `lowest`, above 0, in any order. Returns how many; or `room`, when there may be no room
  /// for all: then what was written means nothing. Shapes: out: [room].
  size_t (*collect)(const SignsPass& pass, size_t n, int32_t lowest, size_t room, float* out);
  /// The largest magnitude; a NaN is larger than any number.
  int32_t (*largest)(const float* magnitudes, size_t n);
  /// The sum of those above a threshold, in any order.
  /// All magnitudes are without a sign.
  double (*sum_above)(const float* magnitudes, size_t n, int32_t threshold);
  /// Returns the sum of squares of the new residual, as FeedbackKernels::copy_squares() does.
  double (*residual)(const SignsPass& pass, SignsOut& out, size_t n);
  /// As ends_of_signs(), of whole words. ends: [count + kEndSlack].
  size_t (*ends)(const uint64_t* sent, const uint64_t* negative, size_t words, uint32_t* ends);
  /// As kernels::split_gaps().
  void (*split)(const GapsToSplit& gaps, uint64_t* tails, uint64_t* highs, uint64_t* high_bits);
};

const SignKernels& scalar_signs();

}  // namespace smartinf::kernels
