#include "smartinf/csd/compressed_gradient.h"

#include <algorithm>
#include <array>
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

uint64_t checksum_of(std::span<const std::byte> message) {
  return base::checksum(message.subspan(sizeof(CompressedHeader)),
                        base::checksum(message.first(kChecksumOffset), kCompressedMagic));
}

uint64_t squares_bytes(uint64_t elements) {
  return base::divide_up(elements, kSquaresElements) * sizeof(base::Bf16);
}

/// Bits of a gap that are written as they are. Gaps between k values among n elements are close to
/// geometric with mean n / k, for which this is within a few hundredths of a bit of the best.
uint8_t low_bits_of(uint64_t elements, uint64_t values) {
  return values == 0 ? uint8_t{0} : static_cast<uint8_t>(std::bit_width(elements / values) - 1);
}

/// First bit first in each byte.
class BitWriter {
 public:
  explicit BitWriter(std::vector<std::byte>& out) : out_(out) {}
  void put(uint64_t bits, unsigned count) {  // count <= 32
    word_ |= bits << filled_;
    for (filled_ += count; filled_ >= 8; filled_ -= 8, word_ >>= 8) {
      out_.push_back(static_cast<std::byte>(word_));
    }
  }
  void put_zeros(uint64_t count) {
    for (; count > 32; count -= 32) put(0, 32);
    put(0, static_cast<unsigned>(count));
  }
  void finish() {
    if (filled_ > 0) out_.push_back(static_cast<std::byte>(word_));
  }

 private:
  std::vector<std::byte>& out_;
  uint64_t word_ = 0;
  unsigned filled_ = 0;
};

/// Never reads beyond its bytes; past the end there are zeros, and at() says so.
class BitReader {
 public:
  explicit BitReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  uint64_t at() const { return at_; }
  uint64_t end() const { return bytes_.size() * 8; }

  /// Zeros before the next one, which is passed too. False when there is none.
  bool unary(uint64_t& zeros) {
    zeros = 0;
    while (at_ < end()) {
      const uint64_t word = peek();
      if (word != 0) {
        const auto run = static_cast<unsigned>(std::countr_zero(word));
        zeros += run;
        at_ += run + 1;
        return at_ <= end();
      }
      zeros += kPeeked;
      at_ += kPeeked;
    }
    return false;
  }
  uint64_t take(unsigned count) {  // count <= kLowBitsMax
    const uint64_t bits = peek() & ((uint64_t{1} << count) - 1);
    at_ += count;
    return bits;
  }
  bool rest_is_zero() { return at_ <= end() && end() - at_ < 8 && (at_ == end() || peek() == 0); }

 private:
  static constexpr unsigned kPeeked = 57;
  uint64_t peek() const {
    const uint64_t first = at_ / 8;
    if (first >= bytes_.size()) return 0;
    uint64_t word = 0;
    std::memcpy(&word, bytes_.data() + first,
                std::min<size_t>(sizeof(word), bytes_.size() - first));
    return word >> (at_ % 8) & ((uint64_t{1} << kPeeked) - 1);
  }

  std::span<const std::byte> bytes_;
  uint64_t at_ = 0;
};

/// Calls visit(index) for each; false when the bits give less, more, or leave the block.
template <typename Visit>
bool for_each_index(std::span<const std::byte> gaps, uint8_t low_bits, uint64_t values,
                    uint64_t elements, Visit visit) {
  BitReader reader(gaps);
  uint64_t index = 0;
  for (uint64_t i = 0; i < values; ++i) {
    uint64_t high = 0;
    if (!reader.unary(high) || high > elements) return false;
    index += high << low_bits | reader.take(low_bits);
    if (index >= elements || reader.at() > reader.end()) return false;
    visit(index);
    ++index;
  }
  return reader.rest_is_zero();
}

template <typename Bits>
void scatter(std::span<const std::byte> gaps, uint8_t low_bits, std::span<const std::byte> data,
             uint64_t elements, std::byte* out) {
  const std::byte* value = data.data();
  for_each_index(gaps, low_bits, data.size() / sizeof(Bits), elements, [&](uint64_t index) {
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

void CompressedWriter::begin(base::SubgroupId subgroup, uint64_t elements, DataType values,
                             bool squares) {
  header_ = CompressedHeader{};
  header_.value_type = static_cast<uint8_t>(values);
  header_.has_squares = squares ? 1 : 0;
  header_.subgroup = subgroup.value;
  header_.elements = elements;
  header_.blocks = static_cast<uint32_t>(base::divide_up(elements, kBlockElements));
  next_block_ = 0;
  message_.clear();
  message_.resize(sizeof(header_) + header_.blocks * sizeof(CompressedBlock));
}

void CompressedWriter::add_block(std::span<const uint32_t> indices, std::span<const float> values,
                                 std::span<const float> squares) {
  SI_CHECK(next_block_ < header_.blocks, "more blocks than the subgroup has");
  const uint64_t elements =
      std::min(kBlockElements, header_.elements - next_block_ * kBlockElements);
  SI_CHECK(indices.size() == values.size() && values.size() <= elements, "an index for each value");
  const bool wanted = header_.has_squares != 0;
  SI_CHECK(squares.size() == (wanted ? base::divide_up(elements, kSquaresElements) : 0),
           "one mean square for each group, or none");
  const auto type = static_cast<DataType>(header_.value_type);
  const auto append = [&](std::span<const float> floats, DataType as) {
    const size_t at = message_.size();
    message_.resize(at + floats.size() * base::data_type_bytes(as));
    kernels::kernels().cast_from_f32(floats.data(), message_.data() + at, as, floats.size());
  };
  append(squares, DataType::kBf16);
  append(values, type);
  const bool dense = values.size() == elements;
  const uint8_t low_bits = dense ? kDense : low_bits_of(elements, values.size());
  if (!dense) {
    BitWriter bits(message_);
    uint64_t expected = 0;
    for (const uint32_t index : indices) {
      SI_CHECK(index >= expected && index < elements, "indices ascend within the block");
      const uint64_t gap = index - expected;
      bits.put_zeros(gap >> low_bits);
      bits.put(1 | (gap & ((uint64_t{1} << low_bits) - 1)) << 1, 1u + low_bits);
      expected = uint64_t{index} + 1;
    }
    bits.finish();
  }
  const uint64_t end = message_.size() - sizeof(header_) - header_.blocks * sizeof(CompressedBlock);
  SI_CHECK(end <= ~uint32_t{0}, "a message of less than 4 GiB");
  const CompressedBlock entry{static_cast<uint32_t>(end), static_cast<uint32_t>(values.size()) |
                                                              uint32_t{low_bits} << kLowBitsShift};
  std::memcpy(message_.data() + sizeof(header_) + next_block_ * sizeof(entry), &entry,
              sizeof(entry));
  ++next_block_;
}

std::span<const std::byte> CompressedWriter::finish() {
  SI_CHECK(next_block_ == header_.blocks, "a message needs all its blocks");
  header_.bytes = message_.size();
  std::memcpy(message_.data(), &header_, sizeof(header_));
  seal_compressed(message_);
  return message_;
}

uint64_t CompressedWriter::bytes_max(uint64_t elements, uint64_t per_block, DataType values,
                                     bool squares) {
  const uint64_t blocks = base::divide_up(elements, kBlockElements);
  const uint64_t n = std::min(elements, kBlockElements);
  const uint64_t k = std::min(per_block, n);
  // The high parts of all gaps sum to less than n >> low, the ones and low bits to k * (1 + low).
  // Fewer values have longer gaps, but never so many more bits that the sum grows.
  const uint64_t low = low_bits_of(n, k);
  const uint64_t bits = k == n ? 0 : k * (1 + low) + (n >> low) + 8;
  const uint64_t block = (squares ? squares_bytes(n) : 0) + k * base::data_type_bytes(values) +
                         base::divide_up(bits, 8) + sizeof(CompressedBlock);
  return sizeof(CompressedHeader) + blocks * block;
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
  section.squares = bytes.first(has_squares() ? squares_bytes(section.elements) : 0);
  bytes = bytes.subspan(section.squares.size());
  section.data = bytes.first(section.values * base::data_type_bytes(type()));
  section.gaps = bytes.subspan(section.data.size());
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
  if (header.value_type > static_cast<uint8_t>(DataType::kF16) || header.has_squares > 1 ||
      header.reserved != 0) {
    return corrupt("a field of its header has no meaning");
  }
  if (header.elements == 0 || header.elements / kBlockElements > header.blocks ||
      base::divide_up(header.elements, kBlockElements) != header.blocks ||
      message.size() < view.sections_offset()) {
    return corrupt(std::to_string(header.blocks) + " blocks for " +
                   std::to_string(header.elements) + " elements");
  }
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

Status CompressedView::check_block(uint64_t block) const {
  const CompressedBlock found = entry(block);
  const uint64_t begin = block == 0 ? 0 : entry(block - 1).end;
  const uint64_t elements = elements_of(block);
  const uint64_t count = found.count & kCountMask;
  const auto low_bits = static_cast<uint8_t>(found.count >> kLowBitsShift);
  const auto bad = [&](const std::string& what) {
    return corrupt("block " + std::to_string(block) + " " + what);
  };
  const uint64_t known =
      (has_squares() ? squares_bytes(elements) : 0) + count * base::data_type_bytes(type());
  if (found.end < begin || found.end > message_.size() - sections_offset() || count > elements ||
      known > found.end - begin) {
    return bad("does not fit its section");
  }
  const Section parts = section(block);
  if (low_bits == kDense) {
    if (count != elements || !parts.gaps.empty()) return bad("is neither dense nor indexed");
    return Status();
  }
  if (low_bits > kLowBitsMax) return bad("has gaps of no known form");
  if (!for_each_index(parts.gaps, low_bits, count, elements, [](uint64_t) {})) {
    return bad("has indices that leave it, or more or fewer than values");
  }
  return Status();
}

void CompressedView::expand_block(uint64_t block, std::byte* out) const {
  const Section parts = section(block);
  if (parts.low_bits == kDense) {
    std::memcpy(out, parts.data.data(), parts.data.size());
    return;
  }
  std::memset(out, 0, parts.elements * base::data_type_bytes(type()));
  if (type() == DataType::kF32) {
    scatter<uint32_t>(parts.gaps, parts.low_bits, parts.data, parts.elements, out);
  } else {
    scatter<uint16_t>(parts.gaps, parts.low_bits, parts.data, parts.elements, out);
  }
}

void CompressedView::squares_of_block(uint64_t block, float* out) const {
  const Section parts = section(block);
  kernels::kernels().cast_to_f32(parts.squares.data(), DataType::kBf16, out,
                                 parts.squares.size() / sizeof(base::Bf16));
}

}  // namespace smartinf::csd
