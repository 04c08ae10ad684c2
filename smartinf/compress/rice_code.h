// Where a block's values belong, and the signs of those that have no other value: gaps between
// them, low parts in one stream of bits and high parts in another. docs/format.md has the grammar.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "smartinf/kernels/signs.h"

namespace smartinf::compress {

/// Properties of a block's gaps that both sides know.
struct RiceParameters {
  unsigned low_bits = 0;   // of a gap that are written as they are, at most kGapLowBitsMax
  unsigned sign_bits = 0;  // 1 where signs are written too
  uint64_t values = 0;
  uint64_t elements = 0;  // of the block

  unsigned tail_bits() const { return low_bits + sign_bits; }
};
inline constexpr unsigned kGapLowBitsMax = 16;

/// The best number of low bits for so many values. Gaps between k values among n elements are close
/// to geometric with mean n / k, for which this is within a few hundredths of a bit of the best.
unsigned gap_low_bits(uint64_t elements, uint64_t values);
/// No block of so many elements with at most so many values has longer gaps.
uint64_t rice_bytes_max(uint64_t elements, uint64_t values, unsigned sign_bits);

/// Its memory is kept for the next block.
class RiceWriter {
 public:
  /// Appends gaps and signs. ends: [1 + values], 0 and then where each value ends, as
  /// kernels::ends_of_signs() makes them; ascending and inside the block.
  void append(std::span<const uint32_t> ends, const RiceParameters& parameters,
              std::vector<std::byte>& out);

 private:
  std::vector<uint64_t> tails_;
  std::vector<uint64_t> highs_;
  std::vector<uint64_t> high_bits_;
};

/// Never reads beyond its bytes.
class RiceReader {
 public:
  /// parameters: with at most kGapLowBitsMax low bits.
  RiceReader(std::span<const std::byte> bytes, const RiceParameters& parameters);

  /// Whether the bytes are the gaps of as many values, all of them inside the block, and nothing
  /// else.
  bool well_formed() const;
  /// visit(index, sign) for each, of what is well formed; ascending.
  template <typename Visit>
  void for_each(Visit visit) const {
    uint64_t i = 0;
    uint64_t lows = 0;  // sum
    const uint64_t low_mask = (uint64_t{1} << form_.low_bits) - 1;
    for (uint64_t first = tails_bytes_; first < bytes_.size(); first += sizeof(uint64_t)) {
      const uint64_t zeros_before = (first - tails_bytes_) * 8 - i;
      const uint64_t before = i;
      for (uint64_t word = word_at(first); word != 0; word &= word - 1, ++i) {
        const auto at = static_cast<uint64_t>(__builtin_ctzll(word));
        const uint64_t tail = tail_of(i);
        lows += tail & low_mask;
        const uint64_t highs = zeros_before + at - (i - before);
        visit((highs << form_.low_bits) + lows + i, tail >> form_.low_bits);
      }
    }
  }

 private:
  /// Eight bytes, zeros beyond the last.
  uint64_t word_at(uint64_t at) const {
    uint64_t word = 0;
    if (at + sizeof(word) <= bytes_.size()) {
      std::memcpy(&word, bytes_.data() + at, sizeof(word));
    } else {
      std::memcpy(&word, bytes_.data() + at, bytes_.size() - at);
    }
    return word;
  }
  uint64_t tail_of(uint64_t i) const {
    const uint64_t at = i * form_.tail_bits();
    return word_at(at / 8) >> at % 8 & tail_mask_;
  }

  std::span<const std::byte> bytes_;
  RiceParameters form_;
  uint64_t tails_bytes_ = 0;
  uint64_t tail_mask_ = 0;
};

}  // namespace smartinf::compress
