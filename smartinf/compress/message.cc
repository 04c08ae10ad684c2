#include "smartinf/compress/message.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/signs.h"
#include "smartinf/kernels/update.h"

namespace smartinf::compress {
namespace {

using base::DataType;
using base::ErrorCode;
using base::kBlockElements;
using base::Status;

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

constexpr size_t kChecksumOffset = offsetof(CompressedHeader, checksum);
constexpr uint16_t kBf16Sign = 0x8000;
// A factor's byte: 5 bits of exponent and 3 of mantissa, of the upper 11 bits of an f32.
constexpr uint32_t kFactorCut = 20;
constexpr uint32_t kFactorMantissaBits = 3;
constexpr uint32_t kFactorExponents = 31;  // below the largest one
constexpr uint32_t kFactorMost = (254u << kFactorMantissaBits) + 7;

uint64_t checksum_of(std::span<const std::byte> message) {
  return base::checksum(message.subspan(sizeof(CompressedHeader)),
                        base::checksum(message.first(kChecksumOffset), kCompressedMagic));
}

uint64_t data_bytes(ValueEncoding encoding, uint64_t values) {
  if (encoding == ValueEncoding::kSign) return sizeof(base::Bf16);
  return values * base::data_type_bytes(expanded_type(encoding));
}

unsigned sign_bits_of(ValueEncoding encoding) { return encoding == ValueEncoding::kSign ? 1 : 0; }
uint32_t sign_of(float value) { return std::bit_cast<uint32_t>(value) >> 31; }

/// The upper bits of a factor, rounded to the nearest.
uint32_t factor_bits(float value) {
  SI_CHECK(value >= 0, "factors are neither negative nor NaN");
  const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffffu;
  return std::min((bits + (1u << (kFactorCut - 1))) >> kFactorCut, kFactorMost);
}

/// Summed in the order of the elements, so that it is the same everywhere.
base::Bf16 mean_magnitude(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += std::abs(value);
  return kernels::mean_magnitude(sum, values.size());
}

uint16_t magnitude_bits(std::span<const std::byte> data) {
  uint16_t bits = 0;
  std::memcpy(&bits, data.data(), sizeof(bits));
  return bits;
}

template <typename Bits>
void scatter(const RiceReader& gaps, const std::byte* value, std::byte* out) {
  gaps.for_each([&](uint64_t index, uint64_t) {
    std::memcpy(out + index * sizeof(Bits), value, sizeof(Bits));
    value += sizeof(Bits);
  });
}

Status corrupt(const std::string& what) {
  return Status(ErrorCode::kCorrupt, "a compressed gradient is refused: " + what,
                "The step is aborted and can be repeated; if it happens again, memory or the "
                "path to the device is failing.");
}

}  // namespace

uint64_t factors_bytes(std::span<const MatrixLayout> matrices, uint64_t first, uint64_t count) {
  return factors_bytes(factors_in(matrices, first, count),
                       kFactorRunsPerMatrix * matrices_in(matrices, first, count).size());
}

void append_factor_runs(std::span<const MatrixLayout> matrices, uint64_t first, uint64_t count,
                        std::vector<uint32_t>& out) {
  for (const MatrixLayout& matrix : matrices_in(matrices, first, count)) {
    const MatrixPart part = part_of(matrix, first, count);
    out.push_back(static_cast<uint32_t>(part.rows()));
    out.push_back(static_cast<uint32_t>(part.columns()));
  }
}

void CompressedWriter::begin(base::SubgroupId subgroup, uint64_t elements, ValueEncoding values,
                             const RowColumnFactors& factors) {
  header_ = CompressedHeader{};
  header_.value_encoding = static_cast<uint8_t>(values);
  header_.subgroup = subgroup.value;
  header_.elements = elements;
  SI_CHECK(factors.values.size() <= ~uint32_t{0}, "as many factors as a message can count");
  header_.runs = static_cast<uint32_t>(factors.runs.size());
  header_.factors = static_cast<uint32_t>(factors.values.size());
  next_block_ = 0;
  message_.clear();
  message_.resize(sizeof(header_) + blocks() * sizeof(CompressedBlock));
  append_factors(factors);
}

void CompressedWriter::append_factors(const RowColumnFactors& factors) {
  const size_t at = message_.size();
  message_.resize(sections_offset());
  std::byte* run_at = message_.data() + at;
  std::byte* code = run_at + factors.runs.size() * sizeof(FactorRun);
  std::span<const float> left = factors.values;
  for (const uint32_t count : factors.runs) {
    SI_CHECK(count > 0 && count <= std::min<size_t>(CountAndByte::kCountMax, left.size()),
             "runs add up to the factors");
    const auto values = left.first(count);
    left = left.subspan(count);
    uint32_t largest = 0;
    for (const float value : values) largest = std::max(largest, factor_bits(value));
    const uint32_t exponent = std::max(largest >> kFactorMantissaBits, kFactorExponents);
    const uint32_t scale = (exponent - kFactorExponents) << kFactorMantissaBits;
    for (const float value : values) {
      const uint32_t bits = factor_bits(value);
      // Values that are not 0, but below the scale, become the smallest code.
      *code++ = static_cast<std::byte>(bits == 0 ? 0 : bits > scale ? bits - scale : 1);
    }
    const FactorRun run{{count, exponent}};
    std::memcpy(run_at, &run, sizeof(run));
    run_at += sizeof(run);
  }
  SI_CHECK(left.empty(), "runs add up to the factors");
}

uint64_t CompressedWriter::elements_of_next_block() const {
  SI_CHECK(next_block_ < blocks(), "more blocks than the subgroup has");
  return std::min(kBlockElements, header_.elements - next_block_ * kBlockElements);
}

void CompressedWriter::add_block(std::span<const uint32_t> indices, std::span<const float> values,
                                 std::span<float> arrived) {
  const uint64_t elements = elements_of_next_block();
  SI_CHECK(indices.size() == values.size() && values.size() <= elements, "an index for each value");
  SI_CHECK(arrived.empty() || arrived.size() == values.size(), "room for all or for none");
  append_values(values, arrived);
  if (values.size() == elements) {
    if (encoding() == ValueEncoding::kSign) append_all_signs(values);
    end_block(values.size(), kDense);
    return;
  }
  ends_.resize(1 + values.size());
  ends_[0] = 0;
  uint32_t expected = 0;
  for (size_t i = 0; i < indices.size(); ++i) {
    SI_CHECK(indices[i] >= expected && indices[i] < elements, "indices ascend within the block");
    expected = indices[i] + 1;
    ends_[i + 1] = expected | sign_of(values[i]) << 31;
  }
  append_gaps(elements, values.size());
}

void CompressedWriter::add_signs(std::span<const uint64_t> sent, std::span<const uint64_t> negative,
                                 size_t count, base::Bf16 magnitude) {
  const uint64_t elements = elements_of_next_block();
  SI_CHECK(encoding() == ValueEncoding::kSign && count < elements, "signs of a part of a block");
  SI_CHECK(sent.size() == base::divide_up(elements, 64) && negative.size() == sent.size(),
           "a bit for each element");
  const float arrives = base::to_f32(magnitude);
  append({&arrives, 1}, DataType::kBf16);
  ends_.resize(1 + sent.size() * 64 + kernels::kEndSlack);
  ends_[0] = 0;
  const size_t found =
      kernels::ends_of_signs(kernels::kernels(), sent, negative, std::span(ends_).subspan(1));
  SI_CHECK(found == count, "as many bits as signs");
  append_gaps(elements, count);
}

void CompressedWriter::append_gaps(uint64_t elements, uint64_t count) {
  const RiceParameters gaps{.low_bits = gap_low_bits(elements, count),
                            .sign_bits = sign_bits_of(encoding()),
                            .values = count,
                            .elements = elements};
  gaps_.append(std::span(ends_).first(1 + count), gaps, message_);
  end_block(count, static_cast<uint8_t>(gaps.low_bits));
}

void CompressedWriter::append_all_signs(std::span<const float> values) {
  for (size_t first = 0; first < values.size(); first += 8) {
    const auto some = values.subspan(first, std::min<size_t>(8, values.size() - first));
    uint32_t signs = 0;
    for (size_t i = 0; i < some.size(); ++i) signs |= sign_of(some[i]) << i;
    message_.push_back(static_cast<std::byte>(signs));
  }
}

void CompressedWriter::end_block(uint64_t count, uint8_t low_bits) {
  const uint64_t end = message_.size() - sections_offset();
  SI_CHECK(end <= ~uint32_t{0}, "a message of less than 4 GiB");
  const CompressedBlock entry{static_cast<uint32_t>(end), {count, low_bits}};
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
  if (encoding() != ValueEncoding::kSign) {
    const size_t at = message_.size();
    const DataType type = expanded_type(encoding());
    append(values, type);
    kernels::kernels().cast_to_f32(message_.data() + at, type, arrived.data(), arrived.size());
    return;
  }
  const float magnitude = base::to_f32(mean_magnitude(values));
  append({&magnitude, 1}, DataType::kBf16);
  for (size_t i = 0; i < arrived.size(); ++i) arrived[i] = std::copysign(magnitude, values[i]);
}

std::span<const std::byte> CompressedWriter::finish() {
  SI_CHECK(next_block_ == blocks(), "a message needs all its blocks");
  header_.bytes = message_.size();
  std::memcpy(message_.data(), &header_, sizeof(header_));
  seal_compressed(message_);
  return message_;
}

uint64_t CompressedWriter::bytes_max(uint64_t elements, uint64_t per_block, ValueEncoding values,
                                     uint64_t factors_bytes) {
  const uint64_t blocks = base::divide_up(elements, kBlockElements);
  const uint64_t n = std::min(elements, kBlockElements);
  const uint64_t k = std::min(per_block, n);
  const uint64_t block =
      data_bytes(values, k) + rice_bytes_max(n, k, sign_bits_of(values)) + sizeof(CompressedBlock);
  return sizeof(CompressedHeader) + blocks * block + factors_bytes;
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
  section.values = found.values.count();
  section.low_bits = static_cast<uint8_t>(found.values.byte());
  section.data = bytes.first(data_bytes(encoding(), section.values));
  section.bits = bytes.subspan(section.data.size());
  return section;
}

RiceReader CompressedView::gaps_of(const Section& section) const {
  return {section.bits,
          {.low_bits = section.low_bits,
           .sign_bits = sign_bits_of(encoding()),
           .values = section.values,
           .elements = section.elements}};
}

base::Result<CompressedView> CompressedView::parse(std::span<const std::byte> message) {
  if (message.size() < sizeof(CompressedHeader)) return corrupt("the message is cut short");
  const CompressedView view = trusted(message);
  const CompressedHeader& header = view.header_;
  if (header.magic != kCompressedMagic) {
    return corrupt("the message does not begin with the magic number");
  }
  if (header.version != kCompressedVersion) {
    return Status(ErrorCode::kMismatch,
                  "a compressed gradient of version " + std::to_string(header.version) +
                      ", and this program knows version " + std::to_string(kCompressedVersion),
                  "Run the same release on both sides of the host link.");
  }
  if (header.bytes != message.size()) {
    return corrupt("the message has " + std::to_string(message.size()) +
                   " bytes, and its header says " + std::to_string(header.bytes));
  }
  if (header.checksum != checksum_of(message)) return corrupt("the checksum is wrong");
  if (header.value_encoding > static_cast<uint8_t>(ValueEncoding::kSign) || header.reserved != 0) {
    return corrupt("a field of the header has an unknown value");
  }
  if (header.elements == 0 || header.elements / kBlockElements > message.size() ||
      message.size() < view.sections_offset()) {
    return corrupt("the message is too short for " + std::to_string(header.elements) +
                   " elements and " + std::to_string(header.factors) + " factors in " +
                   std::to_string(header.runs) + " runs");
  }
  SI_RETURN_IF_ERROR(view.check_factors());
  for (uint64_t block = 0; block < view.blocks(); ++block) {
    SI_RETURN_IF_ERROR(view.check_block(block));
  }
  if (view.entry(view.blocks() - 1).end != message.size() - view.sections_offset()) {
    return corrupt("the sections do not fill the message");
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
  uint64_t factors = 0;
  for (uint64_t i = 0; i < header_.runs; ++i) {
    const CountAndByte run = run_at(i).factors;
    if (run.byte() < kFactorExponents || run.byte() > kFactorMost >> kFactorMantissaBits ||
        run.count() == 0) {
      return corrupt("run " + std::to_string(i) + " of the row and column factors has no exponent");
    }
    factors += run.count();
  }
  if (factors != header_.factors) {
    return corrupt("the runs have " + std::to_string(factors) + " factors, and the message " +
                   std::to_string(header_.factors));
  }
  return Status();
}

FactorRun CompressedView::run_at(uint64_t run) const {
  FactorRun found;
  std::memcpy(&found, message_.data() + runs_offset() + run * sizeof(found), sizeof(found));
  return found;
}

Status CompressedView::check_block(uint64_t block) const {
  const CompressedBlock found = entry(block);
  const uint64_t begin = block == 0 ? 0 : entry(block - 1).end;
  const uint64_t elements = elements_of(block);
  const uint64_t count = found.values.count();
  const auto bad = [&](const std::string& what) {
    return corrupt("block " + std::to_string(block) + " " + what);
  };
  const uint64_t known = data_bytes(encoding(), count);
  if (found.end < begin || found.end > message_.size() - sections_offset() || count > elements ||
      known > found.end - begin) {
    return bad("does not fit its section");
  }
  const Section parts = section(block);
  if (encoding() == ValueEncoding::kSign && (magnitude_bits(parts.data) & kBf16Sign) != 0) {
    return bad("has a magnitude with a sign");
  }
  const unsigned sign_bits = sign_bits_of(encoding());
  if (parts.low_bits == kDense) {
    const uint64_t bits = count * sign_bits;
    if (count != elements || parts.bits.size() != base::divide_up(bits, 8)) {
      return bad("is neither dense nor indexed");
    }
    if (bits % 8 != 0 && std::to_integer<unsigned>(parts.bits.back()) >> bits % 8 != 0) {
      return bad("has bits after its last sign");
    }
    return Status();
  }
  if (parts.low_bits > kGapLowBitsMax) return bad("has gaps of an unknown encoding");
  if (!gaps_of(parts).well_formed()) {
    return bad("has indices that leave it, or more or fewer than values");
  }
  return Status();
}

void CompressedView::expand_block(uint64_t block, std::byte* out) const {
  const Section parts = section(block);
  const bool dense = parts.low_bits == kDense;
  if (!dense) std::memset(out, 0, parts.elements * base::data_type_bytes(type()));
  const RiceReader gaps = gaps_of(dense ? Section() : parts);
  if (encoding() == ValueEncoding::kSign) {
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

uint32_t CompressedView::factor_scale(uint64_t run) const {
  return (run_at(run).factors.byte() - kFactorExponents) << kFactorMantissaBits;
}

void CompressedView::read_factors(uint64_t run, uint64_t first, std::span<float> out) const {
  SI_CHECK(run < runs() && first <= factors() && out.size() <= factors() - first,
           "factors that there are");
  const uint32_t scale = factor_scale(run);
  const std::byte* code = message_.data() + codes_offset() + first;
  for (size_t i = 0; i < out.size(); ++i) {
    const auto bits = std::to_integer<uint32_t>(code[i]);
    out[i] = std::bit_cast<float>(bits == 0 ? 0u : (bits + scale) << kFactorCut);
  }
}

}  // namespace smartinf::compress
