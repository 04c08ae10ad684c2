// The wire form of a compressed gradient: what SmartComp sends over the host link in place of a
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

namespace smartinf::csd {

inline constexpr uint64_t kCompressedMagic = 0x31475243'4e494953;  // "SIINCRG1"
inline constexpr uint16_t kCompressedVersion = 2;

/// How values are written.
enum class ValueForm : uint8_t {
  kF32,
  kBf16,
  kF16,
  kSign,  // a bit each, and for the block one magnitude in bf16: the mean of theirs
};
inline constexpr std::array<std::string_view, 4> kValueFormNames{"f32", "bf16", "f16", "sign"};
constexpr std::string_view value_form_name(ValueForm form) {
  return kValueFormNames[static_cast<size_t>(form)];
}
/// What a device sees them as.
constexpr base::DataType expanded_type(ValueForm form) {
  switch (form) {
    case ValueForm::kF32:
      return base::DataType::kF32;
    case ValueForm::kF16:
      return base::DataType::kF16;
    case ValueForm::kBf16:
    case ValueForm::kSign:
      break;
  }
  return base::DataType::kBf16;
}

/// Little-endian, at the beginning of a message.
struct CompressedHeader {
  uint64_t magic = kCompressedMagic;
  uint16_t version = kCompressedVersion;
  uint8_t value_form = 0;  // ValueForm
  uint8_t reserved = 0;
  uint32_t subgroup = 0;  // a message that went astray is found
  uint64_t elements = 0;  // of the subgroup
  uint32_t blocks = 0;    // divide_up(elements, kBlockElements): the directory's length
  uint32_t factors = 0;   // of the gradient's squares, behind the directory; 0: none
  uint64_t bytes = 0;     // of the whole message
  uint64_t checksum = 0;  // of all bytes but these eight
};
static_assert(sizeof(CompressedHeader) == 48);

/// One entry of the directory, per block.
struct CompressedBlock {
  uint32_t end = 0;    // of the block's section, from the first section on
  uint32_t count = 0;  // values in the lower 24 bits; in the upper 8 the gaps' low bits, or kDense
};
static_assert(sizeof(CompressedBlock) == 8);
/// In place of the gaps' low bits: all elements are there, and no indices.
inline constexpr uint8_t kDense = 0xff;

/// Makes a message, block by block in order. Its memory is kept for the next one.
class CompressedWriter {
 public:
  /// A message holds at most kBlockElements * blocks elements; sections end below 4 GiB (SI_CHECK).
  /// factors: of the whole gradient's squares, for every part of a matrix that the subgroup holds
  /// the mean of each row and then of each column relative to all (plan::FormPart); or empty.
  /// They are neither negative nor NaN; those beyond bf16 become its largest.
  void begin(base::SubgroupId subgroup, uint64_t elements, ValueForm values,
             std::span<const float> factors);
  /// Shapes: indices, values: [k]; indices ascending and inside the block (SI_CHECK). k may be 0.
  /// arrived: [k] for the values as a device will see them, or empty.
  void add_block(std::span<const uint32_t> indices, std::span<const float> values,
                 std::span<float> arrived = {});
  /// The message; valid until the next begin(). All blocks must have been added (SI_CHECK).
  std::span<const std::byte> finish();

  void reserve(uint64_t bytes) { message_.reserve(bytes); }
  /// No message of so many elements with at most `per_block` values in a block is longer.
  static uint64_t bytes_max(uint64_t elements, uint64_t per_block, ValueForm values,
                            uint64_t factors);

 private:
  ValueForm form() const { return static_cast<ValueForm>(header_.value_form); }
  uint64_t sections_offset() const {
    return sizeof(header_) + header_.blocks * sizeof(CompressedBlock) +
           header_.factors * sizeof(base::Bf16);
  }
  void append(std::span<const float> floats, base::DataType type);
  void append_values(std::span<const float> values, std::span<float> arrived);

  std::vector<std::byte> message_;
  CompressedHeader header_;
  uint32_t next_block_ = 0;
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
  /// Of bytes that parse() has accepted.
  static CompressedView trusted(std::span<const std::byte> message);

  base::SubgroupId subgroup() const { return base::SubgroupId{header_.subgroup}; }
  uint64_t elements() const { return header_.elements; }
  uint64_t blocks() const { return header_.blocks; }
  ValueForm form() const { return static_cast<ValueForm>(header_.value_form); }
  base::DataType type() const { return expanded_type(form()); }
  uint64_t factors() const { return header_.factors; }
  uint64_t values(uint64_t block) const { return entry(block).count & 0xffffffu; }

  /// The block's gradient with zeros where nothing was sent. Shapes: out: [block's elements] of
  /// type(). Threads: pure.
  void expand_block(uint64_t block, std::byte* out) const;
  /// The factors from `first` on. Shapes: out: [at most factors() - first].
  void read_factors(uint64_t first, std::span<float> out) const;

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
  uint64_t sections_offset() const {
    return factors_offset() + header_.factors * sizeof(base::Bf16);
  }
  uint64_t factors_offset() const {
    return sizeof(CompressedHeader) + header_.blocks * sizeof(CompressedBlock);
  }
  Section section(uint64_t block) const;
  base::Status check_factors() const;
  base::Status check_block(uint64_t block) const;

  CompressedHeader header_;
  std::span<const std::byte> message_;
};

}  // namespace smartinf::csd
