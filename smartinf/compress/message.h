// The wire format of a compressed gradient: what SmartComp sends over the host link in place of a
// subgroup's whole gradient. Written by the engine, read by every kind of device; docs/format.md
// has the grammar. Blocks stand for themselves, so that a processor expands one block at a time
// and no device needs room for a dense gradient.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/compress/rice_code.h"

namespace smartinf::compress {

inline constexpr uint64_t kCompressedMagic = 0x31475243'4e494953;  // "SIINCRG1"
inline constexpr uint16_t kCompressedVersion = 4;

/// How values are written.
enum class ValueEncoding : uint8_t {
  kF32,
  kBf16,
  kF16,
  kSign,  // a bit each, and for the block one magnitude in bf16: the mean of theirs
};
inline constexpr std::array<std::string_view, 4> kValueEncodingNames{"f32", "bf16", "f16", "sign"};
constexpr base::EnumNames enum_names(ValueEncoding) { return kValueEncodingNames; }
constexpr std::string_view value_encoding_name(ValueEncoding encoding) {
  return base::enum_name(encoding);
}
/// Type that a device sees the values as.
constexpr base::DataType expanded_type(ValueEncoding encoding) {
  switch (encoding) {
    case ValueEncoding::kF32:
      return base::DataType::kF32;
    case ValueEncoding::kF16:
      return base::DataType::kF16;
    case ValueEncoding::kBf16:
    case ValueEncoding::kSign:
      break;
  }
  return base::DataType::kBf16;
}

/// Little-endian, at the beginning of a message.
struct CompressedHeader {
  uint64_t magic = kCompressedMagic;
  uint16_t version = kCompressedVersion;
  uint8_t value_encoding = 0;  // ValueEncoding
  uint8_t reserved = 0;        // zero
  uint32_t subgroup = 0;       // a message that went astray is found
  uint64_t elements = 0;       // of the subgroup
  uint32_t runs = 0;           // of factors of the gradient's second moment, behind the directory
  uint32_t factors = 0;        // of all runs; 0: none
  uint64_t bytes = 0;          // of the whole message
  uint64_t checksum = 0;       // of all bytes but these eight
};
static_assert(sizeof(CompressedHeader) == 48);

/// A number below 2^24 and a byte above it.
struct CountAndByte {
  uint32_t bits = 0;

  static constexpr uint32_t kCountMax = 0xffffffu;
  CountAndByte() = default;
  CountAndByte(uint64_t count, uint32_t byte) : bits(static_cast<uint32_t>(count) | byte << 24) {}
  uint32_t count() const { return bits & kCountMax; }
  uint32_t byte() const { return bits >> 24; }
};

/// One entry of the directory, per block.
struct CompressedBlock {
  uint32_t end = 0;     // of the block's section, from the first section on
  CountAndByte values;  // their count, and the gaps' low bits or kDense
};
static_assert(sizeof(CompressedBlock) == 8);
/// In place of the gaps' low bits: all elements are there, and no indices.
inline constexpr uint8_t kDense = 0xff;

/// Before the factors themselves, one entry for each run of them: of one matrix's rows or columns,
/// which share a scale. A factor is a byte: 0 for 0, else the top of an f32 less the scale.
struct FactorRun {
  CountAndByte factors;  // their count, and the exponent of the largest, as in an f32
};
static_assert(sizeof(FactorRun) == 4);
/// One of its rows, one of its columns.
inline constexpr uint64_t kFactorRunsPerMatrix = 2;
/// Bytes of factors in a message.
constexpr uint64_t factors_bytes(uint64_t factors, uint64_t runs) {
  return factors + runs * sizeof(FactorRun);
}
/// The same of all factors of [first, first + count), elements of the parameter space.
uint64_t factors_bytes(std::span<const MatrixLayout> matrices, uint64_t first, uint64_t count);

/// How many each run of them has.
void append_factor_runs(std::span<const MatrixLayout> matrices, uint64_t first, uint64_t count,
                        std::vector<uint32_t>& out);

/// Factors of a second moment as a message's writer takes them: none of them negative or NaN; those
/// beyond a run's scale become its ends.
struct RowColumnFactors {
  std::vector<float> values;
  std::vector<uint32_t> runs;  // so many values each

  void clear() {
    values.clear();
    runs.clear();
  }
};

/// Makes a message, block by block in order. Its memory is kept for the next one.
class CompressedWriter {
 public:
  /// A message holds at most kBlockElements * blocks elements; sections end below 4 GiB (SI_CHECK).
  /// factors: of the whole gradient's second moment, for every part of a matrix that the subgroup
  /// holds a run with the mean of each row and then one with each column relative to all
  /// (MatrixPart); or empty. Runs that do not add up or hold other numbers are bugs (SI_CHECK).
  void begin(base::SubgroupId subgroup, uint64_t elements, ValueEncoding values,
             const RowColumnFactors& factors);
  /// Shapes: indices, values: [k]; indices ascending and inside the block (SI_CHECK). k may be 0.
  /// arrived: [k] for the values as a device will see them, or empty.
  void add_block(std::span<const uint32_t> indices, std::span<const float> values,
                 std::span<float> arrived = {});
  /// add_block() of elements that all arrive as `magnitude` with their sign, but not of all the
  /// block's. For messages of signs (SI_CHECK).
  /// Shapes: sent, negative: [divide_up(block's elements, 64)] as kernels::residual_of_signs()
  /// makes them; `count` bits of sent are set, and no bit of negative that is not.
  void add_signs(std::span<const uint64_t> sent, std::span<const uint64_t> negative, size_t count,
                 base::Bf16 magnitude);
  /// The message; valid until the next begin(). All blocks must have been added (SI_CHECK).
  std::span<const std::byte> finish();

  void reserve(uint64_t bytes) { message_.reserve(bytes); }
  /// No message of so many elements with at most `per_block` values in a block is longer.
  static uint64_t bytes_max(uint64_t elements, uint64_t per_block, ValueEncoding values,
                            uint64_t factors_bytes);

 private:
  ValueEncoding encoding() const { return static_cast<ValueEncoding>(header_.value_encoding); }
  uint64_t blocks() const { return base::divide_up(header_.elements, base::kBlockElements); }
  uint64_t sections_offset() const {
    return sizeof(header_) + blocks() * sizeof(CompressedBlock) +
           factors_bytes(header_.factors, header_.runs);
  }
  void append_factors(const RowColumnFactors& factors);
  void append(std::span<const float> floats, base::DataType type);
  void append_values(std::span<const float> values, std::span<float> arrived);
  uint64_t elements_of_next_block() const;
  void append_gaps(uint64_t elements, uint64_t count);  // of ends_, and ends the block
  void append_all_signs(std::span<const float> values);
  void end_block(uint64_t count, uint8_t low_bits);

  std::vector<std::byte> message_;
  CompressedHeader header_;
  uint32_t next_block_ = 0;
  std::vector<uint32_t> ends_;  // of a block's values
  RiceWriter gaps_;
};

/// Writes the right checksum into a message whose header has the right length; for tests and the
/// fuzzer.
void seal_compressed(std::span<std::byte> message);

/// A message that has been checked through: counts, order, bounds, checksum.
class CompressedView {
 public:
  /// Borrows `message`, which need not be aligned. Errors: kMismatch for another version, else
  /// kCorrupt; both say what is wrong, and nothing was written anywhere.
  static base::Result<CompressedView> parse(std::span<const std::byte> message);
  /// A view of bytes that parse() has accepted.
  static CompressedView trusted(std::span<const std::byte> message);

  base::SubgroupId subgroup() const { return base::SubgroupId{header_.subgroup}; }
  uint64_t elements() const { return header_.elements; }
  uint64_t blocks() const { return base::divide_up(header_.elements, base::kBlockElements); }
  ValueEncoding encoding() const { return static_cast<ValueEncoding>(header_.value_encoding); }
  base::DataType type() const { return expanded_type(encoding()); }
  uint64_t factors() const { return header_.factors; }
  uint64_t runs() const { return header_.runs; }
  uint64_t factors_of(uint64_t run) const { return run_at(run).factors.count(); }
  uint64_t values(uint64_t block) const { return entry(block).values.count(); }

  /// For who decodes elsewhere: the message, where its blocks' sections and the factors' codes begin,
  /// and what is added to a run's codes.
  std::span<const std::byte> bytes() const { return message_; }
  uint64_t sections_offset() const {
    return runs_offset() + factors_bytes(header_.factors, header_.runs);
  }
  uint64_t codes_offset() const { return runs_offset() + runs() * sizeof(FactorRun); }
  uint32_t factor_scale(uint64_t run) const;

  /// The block's gradient with zeros where nothing was sent. Shapes: out: [block's elements] of
  /// type().
  /// Threads: pure.
  void expand_block(uint64_t block, std::byte* out) const;
  /// The factors from `first` on, which lie in `run`. Shapes: out: [at most factors() - first].
  void read_factors(uint64_t run, uint64_t first, std::span<float> out) const;

 private:
  struct Section {
    uint64_t elements = 0;
    uint64_t values = 0;
    uint8_t low_bits = 0;
    std::span<const std::byte> data;  // values, or their magnitude
    std::span<const std::byte> bits;  // gaps, signs
  };
  CompressedBlock entry(uint64_t block) const;
  uint64_t elements_of(uint64_t block) const;
  uint64_t runs_offset() const {
    return sizeof(CompressedHeader) + blocks() * sizeof(CompressedBlock);
  }
  FactorRun run_at(uint64_t run) const;
  Section section(uint64_t block) const;
  RiceReader gaps_of(const Section& section) const;
  base::Status check_factors() const;
  base::Status check_block(uint64_t block) const;

  CompressedHeader header_;
  std::span<const std::byte> message_;
};

}  // namespace smartinf::compress
