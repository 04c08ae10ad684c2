#include "smartinf/csd/compressed_gradient.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/update.h"

namespace smartinf::csd {
namespace {

using base::DataType;
using base::ErrorCode;
using base::kBlockElements;
using base::Status;

static_assert(std::endian::native == std::endian::little, "the wire form is little-endian");

constexpr size_t kChecksumOffset = offsetof(CompressedHeader, checksum);
constexpr uint32_t kCountMask = 0xffffffu;
constexpr uint32_t kLowBitsShift = 24;
constexpr uint8_t kLowBitsMax = 16;
constexpr uint16_t kBf16Sign = 0x8000;
constexpr uint16_t kBf16Infinity = 0x7f80;
constexpr size_t kSignsAtOnce = 32;  // of a dense block

uint64_t checksum_of(std::span<const std::byte> message) {
  return base::checksum(message.subspan(sizeof(CompressedHeader)),
                        base::checksum(message.first(kChecksumOffset), kCompressedMagic));
}

/// Bits of a gap that are written as they are. Gaps between k values among n elements are close to
/// geometric with mean n / k, for which this is within a few hundredths of a bit of the best.
uint8_t low_bits_of(uint64_t elements, uint64_t values) {
  return values == 0 ? uint8_t{0} : static_cast<uint8_t>(std::bit_width(elements / values) - 1);
}

uint64_t data_bytes(ValueForm form, uint64_t values) {
  if (form == ValueForm::kSign) return sizeof(base::Bf16);
  return values * base::data_type_bytes(expanded_type(form));
}

unsigned sign_bits_of(ValueForm form) { return form == ValueForm::kSign ? 1 : 0; }
uint64_t sign_of(float value) { return std::bit_cast<uint32_t>(value) >> 31; }

/// No block of n elements with at most k values has more of them. The high parts of all gaps sum to
/// less than n >> low, the ones, low bits and signs to k * (1 + low + sign_bits). Fewer values have
/// longer gaps, but never so many more bits that the sum grows. Where all fit, all but one are the
/// longest: their ones and its gap are n bits.
uint64_t bits_max(uint64_t n, uint64_t k, unsigned sign_bits) {
  if (k == n) return n * (1 + sign_bits);
  const uint64_t low = low_bits_of(n, k);
  return k * (1 + low + sign_bits) + (n >> low);
}

/// Summed in the order of the elements, so that it is the same everywhere. A NaN has no sign
/// either.
base::Bf16 mean_magnitude(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += std::abs(value);
  const auto mean =
      static_cast<float>(sum / static_cast<double>(std::max<size_t>(values.size(), 1)));
  return {static_cast<uint16_t>(base::to_bf16(mean).bits & ~kBf16Sign)};
}

/// First bit first in each byte.
class BitWriter {
 public:
  BitWriter(std::vector<std::byte>& out, uint64_t bits_max) : out_(out), at_(out.size()) {
    out_.resize(at_ + bits_max / 8 + sizeof(word_));
  }
  /// count <= kPutMax. A whole word is written whatever the count, and the next begins in it.
  void put(uint64_t bits, unsigned count) {
    word_ |= bits << filled_;
    std::memcpy(out_.data() + at_, &word_, sizeof(word_));
    filled_ += count;
    at_ += filled_ / 8;
    word_ >>= filled_ / 8 * 8;
    filled_ %= 8;
  }
  /// So many zeros, then the bits.
  void put_after(uint64_t zeros, uint64_t bits, unsigned count) {
    while (zeros + count > kPutMax) {
      const auto some = static_cast<unsigned>(std::min<uint64_t>(zeros, kPutMax));
      put(0, some);
      zeros -= some;
    }
    put(bits << zeros, static_cast<unsigned>(zeros) + count);
  }
  void finish() { out_.resize(at_ + (filled_ > 0 ? 1 : 0)); }

 private:
  static constexpr unsigned kPutMax = 56;
  std::vector<std::byte>& out_;
  size_t at_;  // of the first byte that is not full
  uint64_t word_ = 0;
  unsigned filled_ = 0;
};

/// Never reads beyond its bytes.
class BitReader {
 public:
  explicit BitReader(std::span<const std::byte> bytes) : bytes_(bytes) { fill(); }

  /// The zeros before the next one, and the `count` bits after it, at most kLowBitsMax + 1. False
  /// when the bytes end before.
  bool take(unsigned count, uint64_t& zeros, uint64_t& bits) {
    const auto run = static_cast<unsigned>(std::countr_zero(word_));
    if (run + 1 + count > left_) return take_slowly(count, zeros, bits);
    zeros = run;
    bits = (word_ >> run >> 1) & mask(count);
    drop(run + 1 + count);
    return true;
  }
  bool rest_is_zero() {
    fill();
    return bytes_.size() * 8 - at_ < 8 && word_ == 0;
  }

 private:
  static constexpr unsigned kFilled = 57;  // whatever bit of a byte is the first
  static uint64_t mask(unsigned count) { return (uint64_t{1} << count) - 1; }

  void fill() {
    const uint64_t first = at_ / 8;
    word_ = 0;
    if (first + sizeof(word_) <= bytes_.size()) {
      std::memcpy(&word_, bytes_.data() + first, sizeof(word_));
    } else if (first < bytes_.size()) {
      std::memcpy(&word_, bytes_.data() + first, bytes_.size() - first);
    }
    word_ = (word_ >> at_ % 8) & mask(kFilled);
    left_ = static_cast<unsigned>(std::min<uint64_t>(kFilled, bytes_.size() * 8 - at_));
  }
  void drop(unsigned count) {
    word_ >>= count;
    left_ -= count;
    at_ += count;
  }
  bool take_slowly(unsigned count, uint64_t& zeros, uint64_t& bits) {
    zeros = 0;
    for (fill(); word_ == 0; fill()) {
      if (left_ == 0) return false;
      zeros += left_;
      drop(left_);
    }
    const auto run = static_cast<unsigned>(std::countr_zero(word_));
    zeros += run;
    drop(run + 1);
    fill();
    if (count > left_) return false;
    bits = word_ & mask(count);
    drop(count);
    return true;
  }

  std::span<const std::byte> bytes_;
  uint64_t at_ = 0;    // in bits
  uint64_t word_ = 0;  // the next bits, of which `left_` are filled
  unsigned left_ = 0;
};

/// What says where a block's values belong, and their signs where these are all there is of them.
struct GapBits {
  std::span<const std::byte> bytes;
  unsigned low_bits = 0;
  unsigned sign_bits = 0;
  uint64_t values = 0;
  uint64_t elements = 0;  // of the block

  /// Calls visit(index, sign) for each; false when the bits give less, more, or leave the block.
  template <typename Visit>
  bool for_each(Visit visit) const {
    BitReader reader(bytes);
    uint64_t index = 0;
    for (uint64_t i = 0; i < values; ++i) {
      uint64_t high = 0;
      uint64_t tail = 0;
      if (!reader.take(low_bits + sign_bits, high, tail) || high > elements) return false;
      index += high << low_bits | (tail & ((uint64_t{1} << low_bits) - 1));
      if (index >= elements) return false;
      visit(index, tail >> low_bits);
      ++index;
    }
    return reader.rest_is_zero();
  }
};

uint16_t magnitude_bits(std::span<const std::byte> data) {
  uint16_t bits = 0;
  std::memcpy(&bits, data.data(), sizeof(bits));
  return bits;
}

template <typename Bits>
void scatter(const GapBits& gaps, const std::byte* value, std::byte* out) {
  gaps.for_each([&](uint64_t index, uint64_t) {
    std::memcpy(out + index * sizeof(Bits), value, sizeof(Bits));
    value += sizeof(Bits);
  });
}

Status corrupt(const std::string& what) {
  return Status(ErrorCode::kCorrupt, "a compressed gradient is refused: " + what,
                "The step is taken back and can be repeated; if it happens again, memory or the "
                "path to the device is failing.");
}

}  // namespace

void CompressedWriter::begin(base::SubgroupId subgroup, uint64_t elements, ValueForm values,
                             std::span<const float> factors) {
  header_ = CompressedHeader{};
  header_.value_form = static_cast<uint8_t>(values);
  header_.subgroup = subgroup.value;
  header_.elements = elements;
  header_.blocks = static_cast<uint32_t>(base::divide_up(elements, kBlockElements));
  SI_CHECK(factors.size() <= ~uint32_t{0}, "as many factors as a message can count");
  header_.factors = static_cast<uint32_t>(factors.size());
  next_block_ = 0;
  message_.clear();
  message_.resize(sizeof(header_) + header_.blocks * sizeof(CompressedBlock));
  append(factors, DataType::kBf16);
  std::byte* at = message_.data() + message_.size() - factors.size() * sizeof(uint16_t);
  for (size_t i = 0; i < factors.size(); ++i, at += sizeof(uint16_t)) {
    uint16_t bits = 0;
    std::memcpy(&bits, at, sizeof(bits));
    SI_CHECK(bits <= kBf16Infinity, "factors are neither negative nor NaN");
    bits = std::min<uint16_t>(bits, kBf16Infinity - 1);
    std::memcpy(at, &bits, sizeof(bits));
  }
}

void CompressedWriter::add_block(std::span<const uint32_t> indices, std::span<const float> values,
                                 std::span<float> arrived) {
  SI_CHECK(next_block_ < header_.blocks, "more blocks than the subgroup has");
  const uint64_t elements =
      std::min(kBlockElements, header_.elements - next_block_ * kBlockElements);
  SI_CHECK(indices.size() == values.size() && values.size() <= elements, "an index for each value");
  SI_CHECK(arrived.empty() || arrived.size() == values.size(), "room for all or for none");
  append_values(values, arrived);
  const bool dense = values.size() == elements;
  const uint8_t low_bits = dense ? kDense : low_bits_of(elements, values.size());
  const unsigned sign_bits = sign_bits_of(form());
  BitWriter bits(message_, bits_max(elements, values.size(), sign_bits));
  if (!dense) {
    uint64_t expected = 0;
    for (size_t i = 0; i < indices.size(); ++i) {
      SI_CHECK(indices[i] >= expected && indices[i] < elements, "indices ascend within the block");
      const uint64_t gap = indices[i] - expected;
      uint64_t tail = gap & ((uint64_t{1} << low_bits) - 1);
      if (sign_bits > 0) tail |= sign_of(values[i]) << low_bits;
      bits.put_after(gap >> low_bits, 1 | tail << 1, 1 + low_bits + sign_bits);
      expected = uint64_t{indices[i]} + 1;
    }
  } else if (sign_bits > 0) {
    for (size_t first = 0; first < values.size(); first += kSignsAtOnce) {
      const auto some = values.subspan(first, std::min(kSignsAtOnce, values.size() - first));
      uint64_t signs = 0;
      for (size_t i = 0; i < some.size(); ++i) signs |= sign_of(some[i]) << i;
      bits.put(signs, static_cast<unsigned>(some.size()));
    }
  }
  bits.finish();
  const uint64_t end = message_.size() - sections_offset();
  SI_CHECK(end <= ~uint32_t{0}, "a message of less than 4 GiB");
  const CompressedBlock entry{static_cast<uint32_t>(end), static_cast<uint32_t>(values.size()) |
                                                              uint32_t{low_bits} << kLowBitsShift};
  std::memcpy(message_.data() + sizeof(header_) + next_block_ * sizeof(entry), &entry,
              sizeof(entry));
  ++next_block_;
}

void CompressedWriter::append(std::span<const float> floats, DataType type) {
  const size_t at = message_.size();
  message_.resize(at + floats.size() * base::data_type_bytes(type));
  kernels::kernels().cast_from_f32(floats.data(), message_.data() + at, type, floats.size());
}

void CompressedWriter::append_values(std::span<const float> values, std::span<float> arrived) {
  if (form() != ValueForm::kSign) {
    const size_t at = message_.size();
    const DataType type = expanded_type(form());
    append(values, type);
    kernels::kernels().cast_to_f32(message_.data() + at, type, arrived.data(), arrived.size());
    return;
  }
  const float magnitude = base::to_f32(mean_magnitude(values));
  append({&magnitude, 1}, DataType::kBf16);
  for (size_t i = 0; i < arrived.size(); ++i) arrived[i] = std::copysign(magnitude, values[i]);
}

std::span<const std::byte> CompressedWriter::finish() {
  SI_CHECK(next_block_ == header_.blocks, "a message needs all its blocks");
  header_.bytes = message_.size();
  std::memcpy(message_.data(), &header_, sizeof(header_));
  seal_compressed(message_);
  return message_;
}

uint64_t CompressedWriter::bytes_max(uint64_t elements, uint64_t per_block, ValueForm values,
                                     uint64_t factors) {
  const uint64_t blocks = base::divide_up(elements, kBlockElements);
  const uint64_t n = std::min(elements, kBlockElements);
  const uint64_t k = std::min(per_block, n);
  const uint64_t block = data_bytes(values, k) +
                         base::divide_up(bits_max(n, k, sign_bits_of(values)), 8) +
                         sizeof(CompressedBlock);
  return sizeof(CompressedHeader) + blocks * block + factors * sizeof(base::Bf16);
}

void seal_compressed(std::span<std::byte> message) {
  const uint64_t checksum = checksum_of(message);
  std::memcpy(message.data() + kChecksumOffset, &checksum, sizeof(checksum));
}

CompressedBlock CompressedView::entry(uint64_t block) const {
  CompressedBlock found;
  std::memcpy(&found, message_.data() + sizeof(CompressedHeader) + block * sizeof(found),
              sizeof(found));
  return found;
}

uint64_t CompressedView::elements_of(uint64_t block) const {
  return std::min(kBlockElements, header_.elements - block * kBlockElements);
}

CompressedView::Section CompressedView::section(uint64_t block) const {
  const CompressedBlock found = entry(block);
  const uint64_t begin = block == 0 ? 0 : entry(block - 1).end;
  std::span<const std::byte> bytes = message_.subspan(sections_offset() + begin, found.end - begin);
  Section section;
  section.elements = elements_of(block);
  section.values = found.count & kCountMask;
  section.low_bits = static_cast<uint8_t>(found.count >> kLowBitsShift);
  section.data = bytes.first(data_bytes(form(), section.values));
  section.bits = bytes.subspan(section.data.size());
  return section;
}

base::Result<CompressedView> CompressedView::parse(std::span<const std::byte> message) {
  if (message.size() < sizeof(CompressedHeader)) return corrupt("it is cut short");
  const CompressedView view = trusted(message);
  const CompressedHeader& header = view.header_;
  if (header.magic != kCompressedMagic) return corrupt("it does not begin as one");
  if (header.version != kCompressedVersion) {
    return Status(ErrorCode::kMismatch,
                  "a compressed gradient of version " + std::to_string(header.version) +
                      ", and this program knows version " + std::to_string(kCompressedVersion),
                  "Run the same release on both sides of the host link.");
  }
  if (header.bytes != message.size()) {
    return corrupt("it has " + std::to_string(message.size()) + " bytes and says " +
                   std::to_string(header.bytes));
  }
  if (header.checksum != checksum_of(message)) return corrupt("its checksum is wrong");
  if (header.value_form > static_cast<uint8_t>(ValueForm::kSign) || header.reserved != 0) {
    return corrupt("a field of its header has no meaning");
  }
  if (header.elements == 0 || header.elements / kBlockElements > header.blocks ||
      base::divide_up(header.elements, kBlockElements) != header.blocks ||
      message.size() < view.sections_offset()) {
    return corrupt(std::to_string(header.blocks) + " blocks and " + std::to_string(header.factors) +
                   " factors for " + std::to_string(header.elements) + " elements");
  }
  SI_RETURN_IF_ERROR(view.check_factors());
  for (uint64_t block = 0; block < header.blocks; ++block) {
    SI_RETURN_IF_ERROR(view.check_block(block));
  }
  if (view.entry(header.blocks - 1).end != message.size() - view.sections_offset()) {
    return corrupt("its sections do not fill it");
  }
  return view;
}

CompressedView CompressedView::trusted(std::span<const std::byte> message) {
  CompressedView view;
  std::memcpy(&view.header_, message.data(), sizeof(view.header_));
  view.message_ = message;
  return view;
}

Status CompressedView::check_factors() const {
  const std::byte* at = message_.data() + factors_offset();
  for (uint64_t i = 0; i < header_.factors; ++i, at += sizeof(uint16_t)) {
    uint16_t bits = 0;
    std::memcpy(&bits, at, sizeof(bits));
    if (bits < kBf16Infinity) continue;
    return corrupt("factor " + std::to_string(i) + " of its squares is negative or no number");
  }
  return Status();
}

Status CompressedView::check_block(uint64_t block) const {
  const CompressedBlock found = entry(block);
  const uint64_t begin = block == 0 ? 0 : entry(block - 1).end;
  const uint64_t elements = elements_of(block);
  const uint64_t count = found.count & kCountMask;
  const auto low_bits = static_cast<uint8_t>(found.count >> kLowBitsShift);
  const auto bad = [&](const std::string& what) {
    return corrupt("block " + std::to_string(block) + " " + what);
  };
  const uint64_t known = data_bytes(form(), count);
  if (found.end < begin || found.end > message_.size() - sections_offset() || count > elements ||
      known > found.end - begin) {
    return bad("does not fit its section");
  }
  const Section parts = section(block);
  if (form() == ValueForm::kSign && (magnitude_bits(parts.data) & kBf16Sign) != 0) {
    return bad("has a magnitude with a sign");
  }
  const unsigned sign_bits = sign_bits_of(form());
  if (low_bits == kDense) {
    const uint64_t bits = count * sign_bits;
    if (count != elements || parts.bits.size() != base::divide_up(bits, 8)) {
      return bad("is neither dense nor indexed");
    }
    if (bits % 8 != 0 && std::to_integer<unsigned>(parts.bits.back()) >> bits % 8 != 0) {
      return bad("has bits after its last sign");
    }
    return Status();
  }
  if (low_bits > kLowBitsMax) return bad("has gaps of no known form");
  const GapBits gaps{parts.bits, low_bits, sign_bits, count, elements};
  if (!gaps.for_each([](uint64_t, uint64_t) {})) {
    return bad("has indices that leave it, or more or fewer than values");
  }
  return Status();
}

void CompressedView::expand_block(uint64_t block, std::byte* out) const {
  const Section parts = section(block);
  const bool dense = parts.low_bits == kDense;
  if (!dense) std::memset(out, 0, parts.elements * base::data_type_bytes(type()));
  const GapBits gaps{parts.bits, parts.low_bits, sign_bits_of(form()), parts.values,
                     parts.elements};
  if (form() == ValueForm::kSign) {
    const auto put_sign = [&, magnitude = magnitude_bits(parts.data)](uint64_t index,
                                                                      uint64_t sign) {
      const auto bits = static_cast<uint16_t>(magnitude | sign << 15);
      std::memcpy(out + index * sizeof(bits), &bits, sizeof(bits));
    };
    if (!dense) {
      gaps.for_each(put_sign);
      return;
    }
    for (uint64_t i = 0; i < parts.elements; ++i) {
      put_sign(i, std::to_integer<uint64_t>(parts.bits[i / 8]) >> (i % 8) & 1);
    }
  } else if (dense) {
    std::memcpy(out, parts.data.data(), parts.data.size());
  } else if (type() == DataType::kF32) {
    scatter<uint32_t>(gaps, parts.data.data(), out);
  } else {
    scatter<uint16_t>(gaps, parts.data.data(), out);
  }
}

void CompressedView::read_factors(uint64_t first, std::span<float> out) const {
  SI_CHECK(first <= factors() && out.size() <= factors() - first, "factors that there are");
  kernels::kernels().cast_to_f32(message_.data() + factors_offset() + first * sizeof(base::Bf16),
                                 DataType::kBf16, out.data(), out.size());
}

}  // namespace smartinf::csd
