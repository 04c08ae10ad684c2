#include "smartinf/storage/format.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

/// No container is larger; sums of sizes below it cannot overflow 64 bits.
constexpr uint64_t kContainerBytesMax = uint64_t{1} << 60;

uint64_t align(uint64_t bytes) { return base::round_up(bytes, base::kIoAlignment); }

template <typename T>
T load(std::span<const std::byte> bytes, uint64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

uint64_t word_of(const RunId& run, size_t index) {
  uint64_t word = 0;
  std::memcpy(&word, run.bytes.data() + 8 * index, 8);
  return word;
}

uint64_t superblock_checksum(const Superblock& superblock) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&superblock);
  return base::checksum({bytes + 16, sizeof(Superblock) - 16}, kSuperblockMagic);
}

Status corrupt(std::string what) { return Status(ErrorCode::kCorrupt, std::move(what)); }

bool sound(const Superblock& superblock) {
  return superblock.phase <= Phase::kComplete && (superblock.slots == 1 || superblock.slots == 2) &&
         superblock.device_count > 0 && superblock.device_index < superblock.device_count &&
         superblock.container_bytes <= kContainerBytesMax &&
         superblock.device_count <= kDevicesMax &&
         superblock.layout_bytes >= sizeof(LayoutHeader) &&
         superblock.layout_bytes <=
             sizeof(LayoutHeader) + kSubgroupsMax * sizeof(LayoutSubgroup) + kDescriptionBytesMax &&
         superblock.layout_bytes <= superblock.container_bytes &&
         (superblock.prepared_step == superblock.committed_step ||
          superblock.prepared_step == superblock.committed_step + 1);
}

Status invalid(std::string what) { return Status(ErrorCode::kInvalidArgument, std::move(what)); }

Status check_layout(const StoreLayout& layout, uint32_t slots) {
  if (slots != 1 && slots != 2) return invalid("a store has one slot or two");
  if (layout.planes.empty() || layout.planes.size() > kPlanesMax ||
      layout.planes.front() != base::PlaneKind::kMaster) {
    return invalid("a store needs one to eight planes, master first");
  }
  for (size_t i = 0; i < layout.planes.size(); ++i) {
    if (std::count(layout.planes.begin(), layout.planes.end(), layout.planes[i]) != 1) {
      return invalid(fmt::format("plane {} occurs twice", base::plane_kind_name(layout.planes[i])));
    }
  }
  if (layout.subgroups.empty()) return invalid("a device without subgroups needs no store");
  if (layout.subgroups.size() > kSubgroupsMax) return invalid("too many subgroups");
  if (layout.device_count == 0 || layout.device_index >= layout.device_count) {
    return invalid("the device's index is not below the number of devices");
  }
  if (layout.description.size() > kDescriptionBytesMax)
    return invalid("the description is too long");
  if (layout.gradient_spill_bytes > 16) return invalid("too many spill bytes per element");
  return Status();
}

}  // namespace

Result<Geometry> Geometry::make(const StoreLayout& layout, uint32_t slots) {
  SI_RETURN_IF_ERROR(check_layout(layout, slots));
  Geometry geometry;
  geometry.slots_ = slots;
  geometry.planes_ = layout.planes.size();
  geometry.gradient_spill_bytes_ = layout.gradient_spill_bytes;
  for (size_t i = 0; i < layout.planes.size(); ++i) {
    geometry.encodings_[i] = base::plane_encoding(layout.format, layout.planes[i]);
  }
  const size_t count = layout.subgroups.size();
  geometry.counts_.reserve(count);
  geometry.extent_offsets_.reserve(count);
  geometry.plane_offsets_.reserve(count * (geometry.planes_ + 1));
  geometry.record_offsets_.reserve(count * geometry.planes_);
  geometry.gradient_offsets_.reserve(count);
  geometry.index_.reserve(count);

  uint64_t elements = 0;
  uint64_t record = sizeof(TableHeader);
  for (size_t i = 0; i < count; ++i) {
    const StoredSubgroup& subgroup = layout.subgroups[i];
    if (subgroup.count == 0 || subgroup.count > kElementsMax - elements) {
      return invalid(fmt::format("subgroup {} has no elements, or the sum of all is too large",
                                 subgroup.id.value));
    }
    elements += subgroup.count;
    if (!geometry.index_.emplace(subgroup.id.value, i).second) {
      return invalid(fmt::format("subgroup {} occurs twice", subgroup.id.value));
    }
    geometry.counts_.push_back(subgroup.count);
    uint64_t offset = 0;
    for (size_t plane = 0; plane < geometry.planes_; ++plane) {
      geometry.plane_offsets_.push_back(offset);
      offset += align(base::encoded_bytes(geometry.encodings_[plane], subgroup.count));
      geometry.record_offsets_.push_back(record);
      record += sizeof(PlaneRecord) + 8 * base::divide_up(subgroup.count, base::kBlockElements);
    }
    geometry.plane_offsets_.push_back(offset);
    geometry.extent_bytes_max_ = std::max(geometry.extent_bytes_max_, offset);
  }

  geometry.layout_bytes_ =
      sizeof(LayoutHeader) + count * sizeof(LayoutSubgroup) + layout.description.size();
  geometry.layout_stride_ = align(geometry.layout_bytes_);
  geometry.tables_offset_ = kSuperblockAreaBytes + kLayoutCopies * geometry.layout_stride_;
  geometry.table_records_bytes_ = record;
  geometry.table_stride_ = align(record + Store::kClientMetadataBytesMax);
  uint64_t offset = geometry.tables_offset_ + kTablePlaces * kTableCopies * geometry.table_stride_;
  for (size_t i = 0; i < count; ++i) {
    geometry.extent_offsets_.push_back(offset);
    offset += slots * geometry.extent_bytes(i);
  }
  for (size_t i = 0; i < count; ++i) {
    geometry.gradient_offsets_.push_back(offset);
    offset += geometry.gradient_bytes(i);
  }
  geometry.container_bytes_ = offset;
  return geometry;
}

size_t Geometry::index_of(base::SubgroupId id) const {
  const auto found = index_.find(id.value);
  SI_CHECK(found != index_.end(), "a subgroup that this store does not hold");
  return found->second;
}

uint64_t Geometry::blocks(size_t subgroup) const {
  return base::divide_up(counts_[subgroup], base::kBlockElements);
}

uint64_t Geometry::block_bytes(size_t subgroup, size_t plane, uint64_t block) const {
  const uint64_t first = block * base::kBlockElements;
  SI_CHECK(first < counts_[subgroup], "a block outside its subgroup");
  return base::encoded_bytes(encodings_[plane],
                             std::min(base::kBlockElements, counts_[subgroup] - first));
}

uint64_t Geometry::gradient_bytes(size_t subgroup) const {
  return align(counts_[subgroup] * gradient_spill_bytes_);
}

void seal_superblock(Superblock& superblock) {
  superblock.checksum = superblock_checksum(superblock);
}

Result<Superblock> parse_superblock(std::span<const std::byte> bytes, uint32_t copy) {
  if (bytes.size() < sizeof(Superblock)) return corrupt("the superblock is cut short");
  const auto superblock = load<Superblock>(bytes, 0);
  if (superblock.magic != kSuperblockMagic) {
    return Status(ErrorCode::kNotFound, "not a smartinf container");
  }
  if (superblock.checksum != superblock_checksum(superblock)) {
    return corrupt(fmt::format("superblock copy {} has a wrong checksum", copy));
  }
  if (superblock.readable_since > kFormatVersion) {
    return Status(ErrorCode::kMismatch,
                  fmt::format("format version {} needs a program that knows version {}; this one "
                              "knows {}",
                              superblock.version, superblock.readable_since, kFormatVersion),
                  "Use the smartinf that wrote it, or a newer one.");
  }
  if (superblock.copy != copy) {
    return corrupt(fmt::format("superblock copy {} holds copy {}", copy, superblock.copy));
  }
  if (!sound(superblock)) {
    return corrupt(fmt::format("superblock copy {} contradicts itself", copy));
  }
  return superblock;
}

Result<Superblock> choose_superblock(std::span<const std::byte> area, uint32_t* bad) {
  Result<Superblock> best = Status(ErrorCode::kNotFound, "not a smartinf container");
  uint32_t damaged = 0;
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    const uint64_t offset = superblock_offset(copy);
    if (offset + kSuperblockBytes > area.size()) break;
    Result<Superblock> found = parse_superblock(area.subspan(offset, kSuperblockBytes), copy);
    if (found.ok()) {
      if (!best.ok() || found->sequence > best->sequence) best = std::move(found);
      continue;
    }
    damaged |= 1u << copy;
    // A newer format says more than a damaged copy, and that more than no superblock at all.
    if (!best.ok() && (best.status().code() == ErrorCode::kNotFound ||
                       found.status().code() == ErrorCode::kMismatch)) {
      best = std::move(found);
    }
  }
  if (bad != nullptr) *bad = damaged;
  return best;
}

std::vector<std::byte> encode_layout(const StoreLayout& layout) {
  LayoutHeader header{};
  header.magic = kLayoutMagic;
  header.subgroup_count = layout.subgroups.size();
  header.description_bytes = layout.description.size();
  header.bytes =
      sizeof(header) + header.subgroup_count * sizeof(LayoutSubgroup) + header.description_bytes;
  header.plane_count = static_cast<uint32_t>(layout.planes.size());
  header.moment_format = static_cast<uint8_t>(layout.format.moments);
  header.master_format = static_cast<uint8_t>(layout.format.master);
  header.checksum_kind = static_cast<uint16_t>(layout.checksum_kind);
  header.gradient_spill_bytes = layout.gradient_spill_bytes;
  header.block_elements = static_cast<uint32_t>(base::kBlockElements);
  for (size_t i = 0; i < layout.planes.size(); ++i) {
    header.planes[i] = static_cast<uint8_t>(layout.planes[i]);
  }
  std::vector<std::byte> bytes(header.bytes);
  uint64_t offset = sizeof(header);
  for (const StoredSubgroup& subgroup : layout.subgroups) {
    const LayoutSubgroup entry{subgroup.id.value, 0, subgroup.first_element, subgroup.count};
    std::memcpy(bytes.data() + offset, &entry, sizeof(entry));
    offset += sizeof(entry);
  }
  std::memcpy(bytes.data() + offset, layout.description.data(), layout.description.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.checksum = base::checksum(std::span<const std::byte>(bytes).subspan(16), kLayoutMagic);
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

Result<StoreLayout> parse_layout(std::span<const std::byte> bytes, const Superblock& superblock) {
  if (bytes.size() < sizeof(LayoutHeader)) return corrupt("the layout record is cut short");
  const auto header = load<LayoutHeader>(bytes, 0);
  if (header.magic != kLayoutMagic)
    return corrupt("the layout record does not begin with the magic number");
  if (header.bytes != superblock.layout_bytes || header.bytes > bytes.size() ||
      header.bytes < sizeof(LayoutHeader)) {
    return corrupt("the layout record has another length than the superblock says");
  }
  if (header.checksum != superblock.layout_checksum ||
      header.checksum != base::checksum(bytes.subspan(16, header.bytes - 16), kLayoutMagic)) {
    return corrupt("the layout record has a wrong checksum");
  }
  // Behind a right checksum only a bug or malice can be wrong; it is still not believed blindly.
  if (header.subgroup_count > kSubgroupsMax || header.description_bytes > kDescriptionBytesMax ||
      header.bytes != sizeof(LayoutHeader) + header.subgroup_count * sizeof(LayoutSubgroup) +
                          header.description_bytes ||
      header.plane_count > kPlanesMax || header.moment_format >= base::kMomentFormatNames.size() ||
      header.master_format >= base::kMasterFormatNames.size() ||
      header.block_elements != base::kBlockElements) {
    return corrupt("the layout record contradicts itself");
  }
  if (header.checksum_kind != static_cast<uint16_t>(ChecksumKind::kXxh3)) {
    return Status(
        ErrorCode::kMismatch,
        fmt::format("the blocks have checksums of kind {}, which this version cannot check",
                    header.checksum_kind),
        "Use the smartinf that wrote the state, or a newer one.");
  }
  StoreLayout layout;
  layout.format = {static_cast<base::MomentFormat>(header.moment_format),
                   static_cast<base::MasterFormat>(header.master_format)};
  if (layout.format.moments == base::MomentFormat::kQ8 && superblock.version < kQ8CodesSince) {
    return Status(
        ErrorCode::kMismatch,
        fmt::format("the q8 state is of format version {}; its codes have changed in version {}",
                    superblock.version, kQ8CodesSince),
        "Convert it to f32 with the smartinf that wrote it (smartinf reshard "
        "--state-format f32), then use this one.");
  }
  layout.run.bytes = superblock.run;
  layout.device_index = superblock.device_index;
  layout.device_count = superblock.device_count;
  layout.gradient_spill_bytes = header.gradient_spill_bytes;
  layout.copied_step = superblock.copied_step;
  for (uint32_t i = 0; i < header.plane_count; ++i) {
    if (header.planes[i] > static_cast<uint8_t>(base::PlaneKind::kResidual)) {
      return corrupt("the layout record names a plane that this version does not know");
    }
    layout.planes.push_back(static_cast<base::PlaneKind>(header.planes[i]));
  }
  layout.subgroups.reserve(header.subgroup_count);
  uint64_t offset = sizeof(header);
  for (uint64_t i = 0; i < header.subgroup_count; ++i) {
    const auto entry = load<LayoutSubgroup>(bytes, offset);
    layout.subgroups.push_back(
        StoredSubgroup{base::SubgroupId{entry.id}, entry.first_element, entry.count});
    offset += sizeof(entry);
  }
  layout.description.assign(reinterpret_cast<const char*>(bytes.data() + offset),
                            header.description_bytes);
  return layout;
}

uint64_t device_seed(const RunId& run, uint32_t device_index) {
  return base::mix_seed(base::mix_seed(word_of(run, 0), word_of(run, 1)), device_index);
}

uint64_t table_seed(const RunId& run, uint32_t device_index, base::StepNumber step) {
  return base::mix_seed(base::mix_seed(device_seed(run, device_index), kTableMagic), step);
}

Status check_table(std::span<const std::byte> bytes, const Geometry& geometry, uint64_t seed,
                   base::StepNumber step) {
  if (bytes.size() < geometry.table_records_bytes()) return corrupt("the table is cut short");
  const auto header = load<TableHeader>(bytes, 0);
  if (header.magic != kTableMagic) return corrupt("the table does not begin with the magic number");
  if (header.step != step) {
    return corrupt(fmt::format("the table is of step {}, not {}", header.step, step));
  }
  if (header.client_metadata_bytes > Store::kClientMetadataBytesMax ||
      header.bytes > bytes.size() ||
      header.bytes != geometry.table_records_bytes() + header.client_metadata_bytes) {
    return corrupt("the table has a wrong length");
  }
  if (header.checksum != base::checksum(bytes.subspan(16, header.bytes - 16), seed)) {
    return corrupt("the table has a wrong checksum");
  }
  for (size_t subgroup = 0; subgroup < geometry.subgroups(); ++subgroup) {
    for (size_t plane = 0; plane < geometry.planes(); ++plane) {
      const auto record = load<PlaneRecord>(bytes, geometry.record_offset(subgroup, plane));
      if (record.blocks != geometry.blocks(subgroup) || record.slot >= geometry.slots() ||
          record.step > step) {
        return corrupt(fmt::format("the table has an impossible record of subgroup {}, plane {}",
                                   subgroup, plane));
      }
    }
  }
  return Status();
}

uint64_t block_seed(uint64_t seed, const BlockIdentity& identity) {
  seed = base::mix_seed(seed, (uint64_t{identity.subgroup} << 32) | identity.plane);
  seed = base::mix_seed(seed, (identity.block << 8) | identity.slot);
  return base::mix_seed(seed, identity.step);
}

uint64_t block_checksum(std::span<const std::byte> bytes, uint64_t seed,
                        const BlockIdentity& identity) {
  return base::checksum(bytes, block_seed(seed, identity));
}

}  // namespace smartinf::storage
