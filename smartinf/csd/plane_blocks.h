// The planes of a subgroup in a slot's memory, block by block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

class PlaneBlocks {
 public:
  PlaneBlocks() = default;
  /// subgroup: its index in the layout. memory_mask: planes that were here already, not read from
  /// the drive for this.
  PlaneBlocks(storage::Store& store, uint32_t subgroup, std::span<std::byte> extent,
              uint32_t memory_mask = 0);

  const storage::StoredSubgroup& subgroup() const { return *subgroup_; }
  base::StateFormat format() const { return store_->layout().format; }
  std::span<const base::PlaneKind> planes() const { return store_->layout().planes; }
  uint64_t blocks() const;
  uint64_t elements(uint64_t block) const;
  base::Encoding encoding(size_t plane) const;
  std::span<std::byte> bytes(size_t plane, uint64_t block) const;
  base::Status verify(size_t plane, uint64_t block) const;
  void seal(size_t plane, uint64_t block) const;

  /// For checksums that are computed where the data are: Store::expected_sum() and so on.
  std::optional<storage::BlockSum> expected_sum(size_t plane, uint64_t block) const {
    return store_->expected_sum(subgroup_->id, plane, block);
  }
  std::optional<uint64_t> seal_seed(size_t plane, uint64_t block) const {
    return store_->seal_seed(subgroup_->id, plane, block);
  }
  void seal(size_t plane, uint64_t block, uint64_t checksum) const {
    store_->seal_block(subgroup_->id, plane, block, checksum);
  }
  /// Bytes from the extent's beginning, and of the whole plane.
  uint64_t offset(size_t plane) const { return store_->plane_offset(subgroup_->id, plane); }
  uint64_t plane_bytes(size_t plane) const { return store_->plane_bytes(subgroup_->id, plane); }
  std::byte* extent() const { return extent_.data(); }

 private:
  storage::Store* store_ = nullptr;
  const storage::StoredSubgroup* subgroup_ = nullptr;
  std::span<std::byte> extent_;
  uint32_t memory_mask_ = 0;
};

}  // namespace smartinf::csd
