// Error feedback where a block sends signs: its largest elements, all as one magnitude with a sign
// each, in two passes over the block and without lists of elements, because so many are sent;
// docs/smartcomp.md has the use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "smartinf/base/float_formats.h"
#include "smartinf/kernels/feedback.h"

namespace smartinf::kernels {

/// The magnitude that `count` elements are sent with, whose magnitudes sum to `sum`: their mean,
/// rounded to bf16, without a sign even where it is NaN. Threads: pure.
base::Bf16 mean_magnitude(double sum, size_t count);

struct SentSigns {
  base::Bf16 magnitude;         // of every sent element
  double residual_squares = 0;  // sum of squares of the new residual, as copy_squares() finds it
};

/// Room that residual_of_signs() needs for candidates.
inline constexpr size_t kSignCandidates = 2 * 16384;

/// The same as add_feedback(), top_k() of its sums, mean_magnitude() of those, and the residual
/// that is left when they are sent as signs with that magnitude, for blocks whose k-th largest
/// magnitude is about known. threshold: as for top_k_near(). Returns nothing when the threshold is
/// too far off, when all elements or more than candidates has room for would be sent, or when those
/// sent are 0, not finite or so unequal that the order of their sum would matter: then only
/// candidates was written, threshold is as it was, and the caller calls the functions named above.
/// Shapes: candidates: [kSignCandidates]; new_residual: [n], may be the gradient itself; sent,
/// negative: [divide_up(n, 64)], bit i % 64 of word i / 64 belongs to element i: whether it is
/// among the k, and whether it is below zero, 0 for others; 0 < k. Threads: safe on disjoint
/// outputs. Errors: none at run time; other lengths and places are bugs (SI_CHECK).
std::optional<SentSigns> residual_of_signs(const KernelTable& table, const FeedbackBlock& block,
                                           size_t k, float& threshold, std::span<float> candidates,
                                           std::span<base::Bf16> new_residual,
                                           std::span<uint64_t> sent, std::span<uint64_t> negative);

/// The bits of an end that are its place; the bit above them is its sign.
inline constexpr uint32_t kEndMask = 0x7fffffffu;
/// Where each sent element ends, its place + 1, ascending; in the top bit whether it is negative.
/// Shapes: sent, negative: [words]; ends: [64 words + kEndSlack]. Returns how many. Threads: pure.
inline constexpr size_t kEndSlack = 64;
size_t ends_of_signs(const KernelTable& table, std::span<const uint64_t> sent,
                     std::span<const uint64_t> negative, std::span<uint32_t> ends);

/// Gaps between elements, the number of those left out before each, two by two. In every entry the
/// first gap's bits are the lower ones.
struct GapPairs {
  std::span<uint64_t> tails;      // a gap's low_bits low bits, then its sign where they are written
  std::span<uint64_t> highs;      // what is above them, as so many zeros and a one
  std::span<uint64_t> high_bits;  // of both; 0 where one has more than kHighBitsMax, and highs then
                                  // mean nothing
};
inline constexpr unsigned kHighBitsMax = 28;
/// Shapes: ends: [1 + 2 pairs or 1 more], 0 and then as ends_of_signs() makes them; all of pairs:
/// [pairs]. low_bits <= 16, sign_bits <= 1 (SI_CHECK). Threads: safe on disjoint outputs.
void split_gaps(const KernelTable& table, std::span<const uint32_t> ends, unsigned low_bits,
                unsigned sign_bits, const GapPairs& pairs);

}  // namespace smartinf::kernels
