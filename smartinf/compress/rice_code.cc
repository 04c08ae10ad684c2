#include "smartinf/compress/rice_code.h"

#include <algorithm>
#include <bit>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"

namespace smartinf::compress {
namespace {

/// First bit first in each byte.
class BitWriter {
 public:
  BitWriter(std::vector<std::byte>& out, uint64_t bits_max) : out_(out), at_(out.size()) {
    out_.resize(at_ + bits_max / 8 + sizeof(word_));
  }
  /// count <= kPutMax. A whole word is written whatever the count, and the next begins in it.
  void put(uint64_t bits, uint64_t count) {
    word_ |= bits << filled_;
    std::memcpy(out_.data() + at_, &word_, sizeof(word_));
    filled_ += count;
    at_ += filled_ / 8;
    word_ >>= filled_ / 8 * 8;
    filled_ %= 8;
  }
  /// So many zeros, then a one.
  void put_one_after(uint64_t zeros) {
    for (; zeros >= kPutMax; zeros -= kPutMax) put(0, kPutMax);
    put(uint64_t{1} << zeros, zeros + 1);
  }
  void finish() { out_.resize(at_ + (filled_ > 0 ? 1 : 0)); }

  static constexpr uint64_t kPutMax = 56;

 private:
  std::vector<std::byte>& out_;
  size_t at_;  // of the first byte that is not full
  uint64_t word_ = 0;
  uint64_t filled_ = 0;
};

uint64_t gap_before(std::span<const uint32_t> ends, size_t i) {
  return (ends[i + 1] & kernels::kEndMask) - (ends[i] & kernels::kEndMask) - 1;
}

/// The high parts of all gaps sum to at most that.
uint64_t zeros_max(const RiceParameters& parameters) {
  return (parameters.elements - parameters.values) >> parameters.low_bits;
}

}  // namespace

unsigned gap_low_bits(uint64_t elements, uint64_t values) {
  return values == 0 ? 0 : static_cast<unsigned>(std::bit_width(elements / values)) - 1;
}

uint64_t rice_bytes_max(uint64_t elements, uint64_t values, unsigned sign_bits) {
  // Where all fit, those of all but one, or of every other one, are the longest: no gaps are needed
  // for all. Fewer values than asked for have longer gaps, but never so many more bits that the sum
  // grows.
  if (values >= elements) {
    return base::divide_up(elements * (1 + sign_bits) + elements / 4, 8) + 1;
  }
  const uint64_t low_bits = gap_low_bits(elements, values);
  const uint64_t bits = values * (1 + low_bits + sign_bits) + (elements >> low_bits);
  return base::divide_up(bits, 8) + 1;  // each stream ends on a whole byte
}

void RiceWriter::append(std::span<const uint32_t> ends, const RiceParameters& parameters,
                        std::vector<std::byte>& out) {
  SI_CHECK(ends.size() == 1 + parameters.values && parameters.low_bits <= kGapLowBitsMax,
           "an end for each");
  SI_CHECK(parameters.values <= parameters.elements &&
               (ends.back() & kernels::kEndMask) <= parameters.elements,
           "values inside the block");
  const size_t pairs = parameters.values / 2;
  const bool odd = parameters.values % 2 != 0;
  tails_.resize(pairs);
  highs_.resize(pairs);
  high_bits_.resize(pairs);
  kernels::split_gaps(kernels::kernels(), ends, parameters.low_bits, parameters.sign_bits,
                      {.tails = tails_, .highs = highs_, .high_bits = high_bits_});

  BitWriter tails(out, parameters.values * parameters.tail_bits());
  if (const unsigned bits = 2 * parameters.tail_bits(); bits > 0) {
    const size_t at_once = BitWriter::kPutMax / bits;
    const auto put_pairs = [&](size_t first, size_t count) {
      uint64_t word = 0;
      for (size_t i = count; i > 0; --i) word = word << bits | tails_[first + i - 1];
      tails.put(word, count * bits);
    };
    size_t p = 0;
    for (; p + at_once <= pairs; p += at_once) put_pairs(p, at_once);
    if (p < pairs) put_pairs(p, pairs - p);
  }
  if (odd) {
    const uint64_t low =
        gap_before(ends, parameters.values - 1) & ((uint64_t{1} << parameters.low_bits) - 1);
    const uint64_t sign = parameters.sign_bits > 0 ? ends.back() >> 31 : 0;
    tails.put(low | sign << parameters.low_bits, parameters.tail_bits());
  }
  tails.finish();

  BitWriter highs(out, parameters.values + zeros_max(parameters));
  const auto put_pair = [&](size_t p) {
    if (high_bits_[p] != 0) return highs.put(highs_[p], high_bits_[p]);
    highs.put_one_after(gap_before(ends, 2 * p) >> parameters.low_bits);
    highs.put_one_after(gap_before(ends, 2 * p + 1) >> parameters.low_bits);
  };
  size_t p = 0;
  for (; p + 2 <= pairs; p += 2) {
    const uint64_t bits = high_bits_[p] + high_bits_[p + 1];
    if (high_bits_[p] != 0 && high_bits_[p + 1] != 0 && bits <= BitWriter::kPutMax) {
      highs.put(highs_[p] | highs_[p + 1] << high_bits_[p], bits);
    } else {
      put_pair(p);
      put_pair(p + 1);
    }
  }
  if (p < pairs) put_pair(p);
  if (odd) highs.put_one_after(gap_before(ends, parameters.values - 1) >> parameters.low_bits);
  highs.finish();
}

RiceReader::RiceReader(std::span<const std::byte> bytes, const RiceParameters& parameters)
    : bytes_(bytes),
      form_(parameters),
      tails_bytes_(std::min<uint64_t>(
          base::divide_up(parameters.values * parameters.tail_bits(), 8), bytes.size())),
      tail_mask_((uint64_t{1} << parameters.tail_bits()) - 1) {}

bool RiceReader::well_formed() const {
  const uint64_t tail_bits = form_.values * form_.tail_bits();
  if (form_.values > form_.elements) return false;
  if (bytes_.size() < base::divide_up(tail_bits, 8)) return false;
  if (form_.values == 0) return bytes_.empty();
  if (tail_bits % 8 != 0 &&
      std::to_integer<unsigned>(bytes_[tails_bytes_ - 1]) >> tail_bits % 8 != 0) {
    return false;
  }
  if (tails_bytes_ == bytes_.size() || bytes_.back() == std::byte{0}) return false;
  uint64_t ones = 0;
  for (uint64_t at = tails_bytes_; at < bytes_.size(); at += sizeof(uint64_t)) {
    ones += static_cast<uint64_t>(std::popcount(word_at(at)));
  }
  if (ones != form_.values) return false;
  // Gaps do not descend: where the last value is inside the block, all are.
  const uint64_t bits =
      (bytes_.size() - tails_bytes_ - 1) * 8 +
      static_cast<uint64_t>(std::bit_width(std::to_integer<unsigned>(bytes_.back())));
  const uint64_t highs = bits - ones;
  if (highs > form_.elements) return false;
  uint64_t lows = 0;
  for (uint64_t i = 0; i < form_.values; ++i) {
    lows += tail_of(i) & ((uint64_t{1} << form_.low_bits) - 1);
  }
  return (highs << form_.low_bits) + lows + form_.values <= form_.elements;
}

}  // namespace smartinf::compress
