// The planes of a subgroup in a slot's memory, block by block.
#pragma once

#include <cstddef>
#include <cstdint>
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

 private:
  storage::Store* store_ = nullptr;
  const storage::StoredSubgroup* subgroup_ = nullptr;
  std::span<std::byte> extent_;
  uint32_t memory_mask_ = 0;
};

}  // namespace smartinf::csd
