#include "smartinf/kernels/signs.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/state_codec.h"

namespace smartinf::kernels {
namespace {

constexpr size_t kWordBits = 64;

float value_of(int32_t magnitude) { return std::bit_cast<float>(magnitude); }

size_t collect(const SignsPass& pass, size_t n, int32_t lowest, size_t room, float* out) {
  size_t found = 0;
  std::array<float, kSquaresGroup> values;
  for (size_t first = 0; first < n; first += kSquaresGroup) {
    const size_t count = std::min(kSquaresGroup, n - first);
    scalar_feedback().add(pass.gradient + first, pass.residual + first, pass.scale, values.data(),
                          count);
    if (room - found <= count) return room;
    for (size_t i = 0; i < count; ++i) {
      const int32_t magnitude = magnitude_of(values[i]);
      if (magnitude >= lowest) out[found++] = value_of(magnitude);
    }
  }
  return found;
}

int32_t largest(const float* magnitudes, size_t n) {
  int32_t found = 0;
  for (size_t i = 0; i < n; ++i) found = std::max(found, magnitude_of(magnitudes[i]));
  return found;
}

double sum_above(const float* magnitudes, size_t n, int32_t threshold) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) {
    if (magnitude_of(magnitudes[i]) > threshold) sum += magnitudes[i];
  }
  return sum;
}

double residual(const SignsPass& pass, SignsOut& out, size_t n) {
  double squares = 0;
  std::array<float, kSquaresGroup> values;
  for (size_t first = 0; first < n; first += kSquaresGroup) {
    const size_t count = std::min(kSquaresGroup, n - first);
    scalar_feedback().add(pass.gradient + first, pass.residual + first, pass.scale, values.data(),
                          count);
    for (size_t i = 0; i < count; ++i) {
      const size_t word = (first + i) / kWordBits;
      const uint64_t bit = uint64_t{1} << (first + i) % kWordBits;
      if (i % kWordBits == 0) out.sent[word] = out.negative[word] = 0;
      const int32_t magnitude = magnitude_of(values[i]);
      const bool tie = magnitude == out.threshold.magnitude && out.threshold.ties > 0;
      out.threshold.ties -= tie ? 1 : 0;
      if (!tie && magnitude <= out.threshold.magnitude) continue;
      out.sent[word] |= bit;
      if (std::signbit(values[i])) out.negative[word] |= bit;
      values[i] -= std::copysign(out.magnitude, values[i]);
    }
    scalar_tiles().encode_bf16(rounding_key(out.rounding_seed, out.element + first).momentum,
                               values.data(), reinterpret_cast<uint16_t*>(out.new_residual + first),
                               count);
    squares += scalar_feedback().copy_squares(out.new_residual + first, nullptr, count);
  }
  return squares;
}

uint32_t end_of(size_t word, uint64_t bits, uint64_t negative) {
  const auto at = static_cast<size_t>(std::countr_zero(bits));
  return static_cast<uint32_t>(word * kWordBits + at + 1) |
         static_cast<uint32_t>(negative >> at & 1) << 31;
}

size_t ends_one_by_one(const uint64_t* sent, const uint64_t* negative, size_t words,
                       uint32_t* ends) {
  size_t found = 0;
  for (size_t w = 0; w < words; ++w) {
    for (uint64_t left = sent[w]; left != 0; left &= left - 1) {
      ends[found++] = end_of(w, left, negative[w]);
    }
  }
  return found;
}

void split(const GapsToSplit& gaps, uint64_t* tails, uint64_t* highs, uint64_t* high_bits) {
  for (size_t p = 0; p < gaps.pairs; ++p) {
    tails[p] = highs[p] = high_bits[p] = 0;
    bool fits = true;
    for (const size_t nth : {0, 1}) {
      const uint32_t* end = gaps.ends + 2 * p + nth + 1;
      const uint64_t gap = (end[0] & kEndMask) - (end[-1] & kEndMask) - 1;
      const uint64_t low = gap & ((uint64_t{1} << gaps.low_bits) - 1);
      const uint64_t sign = gaps.sign_bits > 0 ? end[0] >> 31 : 0;
      tails[p] |= (low | sign << gaps.low_bits) << nth * (gaps.low_bits + gaps.sign_bits);
      const uint64_t zeros = gap >> gaps.low_bits;
      fits = fits && zeros < kHighBitsMax;
      if (!fits) continue;
      highs[p] |= uint64_t{1} << (high_bits[p] + zeros);
      high_bits[p] += zeros + 1;
    }
    if (!fits) high_bits[p] = 0;
  }
}

/// Whether n magnitudes from `lowest` to `largest` add up in f64 without rounding, so that their
/// order does not count: all are multiples of the lowest's last bit, and their sum has 53 bits.
bool adds_exactly(int32_t lowest, int32_t largest) {
  static_assert(kSignCandidates <= size_t{1} << 15);
  constexpr int kMantissa = 23;
  constexpr int kBinades = 53 - 15 - (kMantissa + 1);
  return largest < static_cast<int32_t>(kInfinityBits) &&
         (largest >> kMantissa) - std::max(lowest >> kMantissa, 1) < kBinades;
}

/// Magnitudes of a block that its k largest are among.
struct Collected {
  size_t found = 0;
  int32_t lowest = 0;
};
/// Corrects the threshold of the step before in the second-level cache, where the first try has
/// left the block: between a magnitude that too many have and one that too few have.
std::optional<Collected> collect_near(const SignKernels& kernels, const SignsPass& pass, size_t n,
                                      size_t k, float threshold, std::span<float> out) {
  constexpr float kNear = 0.9f;
  constexpr int kTries = 5;
  float too_low = 0;
  float too_high = 0;  // 0: none known
  float lowest = kNear * threshold;
  for (int i = 0; i < kTries && lowest > 0; ++i) {
    const size_t found = kernels.collect(pass, n, magnitude_of(lowest), out.size(), out.data());
    if (found < out.size() && found >= k) return Collected{found, magnitude_of(lowest)};
    (found < k ? too_high : too_low) = lowest;
    if (too_low == 0) {
      lowest *= 0.7f;
    } else {
      lowest = too_high == 0 ? 1.4f * lowest : (too_low + too_high) / 2;
    }
  }
  return std::nullopt;
}

}  // namespace

const SignKernels& scalar_signs() {
  static constexpr SignKernels kKernels{.collect = collect,
                                        .largest = largest,
                                        .sum_above = sum_above,
                                        .residual = residual,
                                        .ends = ends_one_by_one,
                                        .split = split};
  return kKernels;
}

base::Bf16 mean_magnitude(double sum, size_t count) {
  const auto mean = static_cast<float>(sum / static_cast<double>(std::max<size_t>(count, 1)));
  return {static_cast<uint16_t>(base::to_bf16(mean).bits & (kMagnitudeMask >> 16))};
}

std::optional<SentSigns> residual_of_signs(const KernelTable& table, const FeedbackBlock& block,
                                           size_t k, float& threshold, std::span<float> candidates,
                                           std::span<base::Bf16> new_residual,
                                           std::span<uint64_t> sent, std::span<uint64_t> negative) {
  const size_t n = block.gradient.size();
  SI_CHECK(k > 0 && n <= std::numeric_limits<uint32_t>::max(), "some of what has 32-bit indices");
  SI_CHECK(block.residual.size() == n && new_residual.size() == n, "as many of each");
  SI_CHECK(sent.size() == base::divide_up(n, kWordBits) && negative.size() == sent.size(),
           "a bit for each");
  SI_CHECK(candidates.size() == kSignCandidates, "room for candidates");
  SI_CHECK(block.element % kTileElements == 0, "blocks start on a rounding group");
  const size_t room = candidates.size() / 2;
  if (k >= n || k >= room || !(threshold > 0)) return std::nullopt;
  const SignKernels& kernels = table.tiles().signs;
  const SignsPass pass{.gradient = block.gradient.data(),
                       .residual = block.residual.data(),
                       .scale = block.scale,
                       .fetch = block.next};
  const auto collected = collect_near(kernels, pass, n, k, threshold, candidates.first(room));
  if (!collected) return std::nullopt;
  const auto magnitudes = candidates.first(collected->found);
  const int32_t largest = kernels.largest(magnitudes.data(), magnitudes.size());
  if (!adds_exactly(collected->lowest, largest)) return std::nullopt;
  const Threshold exact =
      threshold_among(table.tiles().selection, magnitudes, k, collected->lowest - 1,
                      magnitude_of(threshold), candidates.subspan(room));
  const double sum = kernels.sum_above(magnitudes.data(), magnitudes.size(), exact.magnitude) +
                     static_cast<double>(exact.ties) * value_of(exact.magnitude);
  SentSigns made{.magnitude = mean_magnitude(sum, k)};
  if (made.magnitude.bits == 0 || made.magnitude.bits > kLargestBf16) return std::nullopt;
  threshold = value_of(kth_magnitude(exact));
  SignsOut out{.element = block.element,
               .rounding_seed = rounding_seed(block.seed, block.step),
               .threshold = exact,
               .magnitude = base::to_f32(made.magnitude),
               .new_residual = new_residual.data(),
               .sent = sent.data(),
               .negative = negative.data()};
  made.residual_squares = kernels.residual(pass, out, n);
  return made;
}

size_t ends_of_signs(const KernelTable& table, std::span<const uint64_t> sent,
                     std::span<const uint64_t> negative, std::span<uint32_t> ends) {
  SI_CHECK(negative.size() == sent.size(), "as many of each");
  SI_CHECK(sent.size() < kEndMask / kWordBits, "places have 31 bits");
  SI_CHECK(ends.size() >= sent.size() * kWordBits + kEndSlack, "room for all");
  return table.tiles().signs.ends(sent.data(), negative.data(), sent.size(), ends.data());
}

void split_gaps(const KernelTable& table, std::span<const uint32_t> ends, unsigned low_bits,
                unsigned sign_bits, const GapPairs& pairs) {
  const size_t count = pairs.tails.size();
  SI_CHECK(pairs.highs.size() == count && pairs.high_bits.size() == count, "as many of each");
  SI_CHECK(2 * count < ends.size() && ends[0] == 0, "two ends for each pair, behind the first gap");
  SI_CHECK(low_bits <= 16 && sign_bits <= 1, "what fits a word");
  table.tiles().signs.split({ends.data(), count, low_bits, sign_bits}, pairs.tails.data(),
                            pairs.highs.data(), pairs.high_bits.data());
}

}  // namespace smartinf::kernels
