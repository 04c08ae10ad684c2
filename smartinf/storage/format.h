// The bytes of a store. docs/format.md shows the same as a grammar with a worked example.
//
//   container := superblock{4} pad layout layout table{2x2} extent{subgroups x slots} spill
//
// A container is the file PATH/smartinf.state or a whole block device; both look alike. All numbers
// are little-endian. Everything starts on a multiple of kIoAlignment, so that it can be moved by
// direct I/O. Nothing here does I/O: bytes in, facts or a typed error out, whatever the bytes are.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian and is read in place");

/// Version of the format that this code writes. Compatibility: a program opens a container when the
/// container's readable_since is at most the program's kFormatVersion. A change that older programs
/// may ignore (a reserved field gets a meaning) raises `version` alone; one that they may not
/// raises readable_since with it.
/// 2: Superblock::copied_step; other codes in q8 planes, so that q8 state is read by 2 and later
/// only,
///    and that of version 1 is refused.
/// 3: master weights other than f32, and moments in q4, which are read by 3 and later only.
inline constexpr uint32_t kFormatVersion = 3;
inline constexpr uint32_t kQ8CodesSince = 2;
inline constexpr uint32_t kPairsSince = 3;
constexpr uint32_t readable_since(base::StateFormat format) {
  if (format.master != base::MasterFormat::kF32) return kPairsSince;
  if (format.moments == base::MomentFormat::kQ4) return kPairsSince;
  return format.moments == base::MomentFormat::kQ8 ? kQ8CodesSince : 1;
}

/// "SMRTINFS" and so on: a file that is something else is recognised before any number is believed.
inline constexpr uint64_t kSuperblockMagic = 0x53464e4954524d53u;  // SMRTINFS
inline constexpr uint64_t kLayoutMagic = 0x4c464e4954524d53u;      // SMRTINFL
inline constexpr uint64_t kTableMagic = 0x54464e4954524d53u;       // SMRTINFT

/// Copies of the superblock lie apart, so that one damaged span of the drive does not take all.
inline constexpr uint32_t kSuperblockCopies = 4;
inline constexpr uint64_t kSuperblockStride = 64 * 1024;
inline constexpr uint64_t kSuperblockBytes = 4096;
inline constexpr uint64_t kSuperblockAreaBytes = kSuperblockCopies * kSuperblockStride;
/// Each superblock write goes to one pair of copies: the pair that does not hold the last one known
/// to be on the medium. So a write that is torn never leaves the container without a superblock.
inline constexpr uint32_t kSuperblockPairs = 2;

/// The layout record and each table are kept twice: one damaged sector does not cost the run.
inline constexpr uint32_t kLayoutCopies = 2;
inline constexpr uint32_t kTableCopies = 2;
/// Tables of even and of odd steps have places of their own: writing one leaves the other alone.
inline constexpr uint32_t kTablePlaces = 2;

inline constexpr uint32_t kPlanesMax = 8;
/// Bounds that a damaged record cannot exceed, so that believing a number never means gigabytes.
inline constexpr uint64_t kSubgroupsMax = uint64_t{1} << 24;
inline constexpr uint64_t kDescriptionBytesMax = uint64_t{1} << 28;
inline constexpr uint32_t kDevicesMax = 65536;
inline constexpr uint64_t kElementsMax = uint64_t{1} << 48;

/// How far a store has come. The order is the order in which it happens.
enum class Phase : uint32_t {
  kCreating = 0,  // space is reserved, the initial state is not complete: start over
  kPrepared = 1,  // the first step is prepared; the other devices of the run may not be so far
  kComplete = 2,  // the first step is committed: create() refuses to touch it from here on
};

/// One 4 KiB copy of the superblock: the root from which everything else is found and checked.
struct Superblock {
  uint64_t magic;     // not a smartinf container: refuse before believing anything else
  uint64_t checksum;  // of all bytes behind it: a torn write or a flipped bit is not believed
  uint32_t version;
  uint32_t readable_since;  // a program that is too old refuses instead of misreading
  uint32_t copy;      // which copy this is: one that was written to the wrong place is not believed
  Phase phase;        // a half-made store is not mistaken for a trained one
  uint64_t sequence;  // the newest copy wins: a stale one does not bring an old step back

  std::array<uint8_t, 16> run;  // a device of another run is not mixed in
  uint32_t device_index;        // devices are not swapped: extents would belong to other subgroups
  uint32_t device_count;        // a missing device is noticed
  uint32_t slots;               // 2, or 1 with durability "none": decides where everything lies
  uint32_t reserved0;           // zero
  uint64_t container_bytes;     // a shortened file is noticed at open, not in the middle of a step

  uint64_t layout_bytes;     // how much to read of the layout record...
  uint64_t layout_checksum;  // ...and that it is the one this container was made with

  uint64_t committed_step;            // the state that stands
  uint64_t prepared_step;             // the state that stands if all devices have prepared it
  uint64_t committed_table_bytes;     // of the table of committed_step...
  uint64_t committed_table_checksum;  // ...so that the table of another attempt at it is not taken
  uint64_t prepared_table_bytes;
  uint64_t prepared_table_checksum;

  uint64_t in_place_step;  // one slot only: the step whose writes may have begun; 0: none. What a
                           // crash leaves is a mixture then, and must not be taken for a state
  uint64_t bytes_written_ever;  // wear of the drive by this store
  uint64_t created_seconds;     // since 1970, for people who look for leftovers
  uint64_t
      copied_step;  // the first step, when it is a copy of a state: a copy that was interrupted
                    // is not taken for a new run that may start from nothing; 0: a new run

  std::array<uint8_t, 3920> reserved;  // zero; makes room for what later versions need
};
static_assert(sizeof(Superblock) == kSuperblockBytes);
static_assert(std::is_trivially_copyable_v<Superblock>);
static_assert(offsetof(Superblock, checksum) == 8);
static_assert(offsetof(Superblock, sequence) == 32);
static_assert(offsetof(Superblock, run) == 40);
static_assert(offsetof(Superblock, container_bytes) == 72);
static_assert(offsetof(Superblock, committed_step) == 96);
static_assert(offsetof(Superblock, in_place_step) == 144);
static_assert(offsetof(Superblock, reserved) == 176);
static_assert(std::has_unique_object_representations_v<Superblock>, "padding would be unchecked");

/// Header of the layout: what the container holds and where; written once. Followed by
/// LayoutSubgroup{subgroup_count} and the description, then zeros to a multiple of kIoAlignment.
struct LayoutHeader {
  uint64_t magic;
  uint64_t checksum;  // of everything behind it, to the end of the description
  uint64_t bytes;     // of header, subgroups and description
  uint64_t subgroup_count;
  uint64_t description_bytes;
  uint32_t plane_count;
  uint8_t moment_format;          // base::MomentFormat: how the planes are to be decoded
  uint8_t master_format;          // base::MasterFormat
  uint16_t checksum_kind;         // ChecksumKind: of the blocks
  uint32_t gradient_spill_bytes;  // per element
  uint32_t block_elements;        // kBlockElements: checksums cover blocks of so many elements
  std::array<uint8_t, kPlanesMax> planes;  // base::PlaneKind, in the order on the drive
};
static_assert(sizeof(LayoutHeader) == 64);
static_assert(std::has_unique_object_representations_v<LayoutHeader>);

struct LayoutSubgroup {
  uint32_t id;
  uint32_t reserved;  // zero
  uint64_t first_element;
  uint64_t count;
};
static_assert(sizeof(LayoutSubgroup) == 24);
static_assert(std::has_unique_object_representations_v<LayoutSubgroup>);

/// The metadata of one step: for every plane of every subgroup where it is and what it must be.
/// Followed, subgroup by subgroup and plane by plane, by PlaneRecord and its block checksums (u64
/// each), then the client metadata.
struct TableHeader {
  uint64_t magic;
  uint64_t checksum;  // of everything behind it, with run, device and step as seed: the table of
                      // another device or step is not taken, although intact
  uint64_t step;
  uint64_t bytes;  // of header, records and client metadata
  uint64_t client_metadata_bytes;
  uint64_t reserved;  // zero
};
static_assert(sizeof(TableHeader) == 48);
static_assert(std::has_unique_object_representations_v<TableHeader>);

inline constexpr uint8_t kPlaneWritten = 1;  // holds a state; before that its bytes mean nothing
inline constexpr uint8_t kPlaneSealed = 2;   // its checksums are to be checked

struct PlaneRecord {
  uint64_t step;  // in which it was last written; part of its blocks' identity
  uint32_t blocks;
  uint8_t slot;  // where its current contents are
  uint8_t flags;
  uint16_t reserved;  // zero
};
static_assert(sizeof(PlaneRecord) == 16);
static_assert(std::has_unique_object_representations_v<PlaneRecord>);

/// Everything that follows from the layout and the number of slots: which byte is where.
class Geometry {
 public:
  /// Errors: kInvalidArgument with what is wrong: no plane, master not first, a plane twice, no
  /// elements, ids twice, sizes that overflow.
  static base::Result<Geometry> make(const StoreLayout& layout, uint32_t slots);

  uint64_t layout_bytes() const { return layout_bytes_; }  // unpadded
  uint64_t layout_offset(uint32_t copy) const {
    return kSuperblockAreaBytes + copy * layout_stride_;
  }
  uint64_t table_records_bytes() const { return table_records_bytes_; }  // header and records
  uint64_t table_bytes_max() const { return table_stride_; }
  uint64_t table_offset(base::StepNumber step, uint32_t copy) const {
    return tables_offset_ + (step % kTablePlaces * kTableCopies + copy) * table_stride_;
  }
  uint64_t container_bytes() const { return container_bytes_; }
  uint32_t slots() const { return slots_; }

  size_t subgroups() const { return extent_offsets_.size(); }
  size_t planes() const { return planes_; }
  /// Position of a subgroup in the layout. A subgroup that is not this store's is a bug.
  size_t index_of(base::SubgroupId id) const;

  uint64_t extent_bytes(size_t subgroup) const { return plane_offset(subgroup, planes_); }
  uint64_t extent_bytes_max() const { return extent_bytes_max_; }
  uint64_t extent_offset(size_t subgroup, uint32_t slot) const {
    return extent_offsets_[subgroup] + slot * extent_bytes(subgroup);
  }
  /// Within an extent; plane == planes() gives the extent's end.
  uint64_t plane_offset(size_t subgroup, size_t plane) const {
    return plane_offsets_[subgroup * (planes_ + 1) + plane];
  }
  uint64_t plane_bytes(size_t subgroup, size_t plane) const {
    return base::encoded_bytes(encodings_[plane], counts_[subgroup]);
  }
  uint64_t blocks(size_t subgroup) const;
  /// Place and size of one checksummed block within its plane.
  uint64_t block_offset(size_t plane, uint64_t block) const {
    return block * base::encoded_bytes(encodings_[plane], base::kBlockElements);
  }
  uint64_t block_bytes(size_t subgroup, size_t plane, uint64_t block) const;
  /// Offset of the plane's record within a table.
  uint64_t record_offset(size_t subgroup, size_t plane) const {
    return record_offsets_[subgroup * planes_ + plane];
  }

  uint64_t gradient_bytes(size_t subgroup) const;
  uint64_t gradient_offset(size_t subgroup) const { return gradient_offsets_[subgroup]; }

 private:
  uint32_t slots_ = 0;
  size_t planes_ = 0;
  uint32_t gradient_spill_bytes_ = 0;
  std::array<base::Encoding, kPlanesMax> encodings_{};
  uint64_t layout_bytes_ = 0;
  uint64_t layout_stride_ = 0;
  uint64_t tables_offset_ = 0;
  uint64_t table_records_bytes_ = 0;
  uint64_t table_stride_ = 0;
  uint64_t extent_bytes_max_ = 0;
  uint64_t container_bytes_ = 0;
  std::vector<uint64_t> counts_;
  std::vector<uint64_t> extent_offsets_;
  std::vector<uint64_t> plane_offsets_;
  std::vector<uint64_t> record_offsets_;
  std::vector<uint64_t> gradient_offsets_;
  std::unordered_map<uint32_t, size_t> index_;
};

constexpr uint64_t superblock_offset(uint32_t copy) { return copy * kSuperblockStride; }

/// Sets the checksum (and nothing else).
void seal_superblock(Superblock& superblock);
/// Reads one copy. Errors: kNotFound (not a superblock at all), kCorrupt, kMismatch (version).
base::Result<Superblock> parse_superblock(std::span<const std::byte> bytes, uint32_t copy);
/// The newest good copy among the first kSuperblockAreaBytes of a container. `bad` gets a bit per
/// damaged copy. Errors: as parse_superblock, of the most telling copy.
base::Result<Superblock> choose_superblock(std::span<const std::byte> area,
                                           uint32_t* bad = nullptr);

/// Layout as written, unpadded.
std::vector<std::byte> encode_layout(const StoreLayout& layout);
/// Errors: kCorrupt. Run and device come from the superblock, the rest from the record.
base::Result<StoreLayout> parse_layout(std::span<const std::byte> bytes,
                                       const Superblock& superblock);

/// Seed of a table's checksum.
uint64_t table_seed(const RunId& run, uint32_t device_index, base::StepNumber step);
/// Checks a table as a whole: magic, step, size, checksum, and that every record agrees with the
/// geometry. Errors: kCorrupt with what is wrong.
base::Status check_table(std::span<const std::byte> bytes, const Geometry& geometry, uint64_t seed,
                         base::StepNumber step);

/// Seed of a block's checksum, besides its place: a block that is whole but belongs elsewhere, or
/// to another step or slot, is found.
struct BlockIdentity {
  uint32_t subgroup = 0;
  uint32_t plane = 0;
  uint64_t block = 0;
  uint32_t slot = 0;
  base::StepNumber step = 0;
};
/// Seed that stands for run and device; the start of block_checksum's.
uint64_t device_seed(const RunId& run, uint32_t device_index);
/// Seed of a block's checksum.
uint64_t block_seed(uint64_t device_seed, const BlockIdentity& identity);
uint64_t block_checksum(std::span<const std::byte> bytes, uint64_t device_seed,
                        const BlockIdentity& identity);

}  // namespace smartinf::storage
