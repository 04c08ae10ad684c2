#include "smartinf/csd/plane_blocks.h"

#include <algorithm>

namespace smartinf::csd {

using base::kBlockElements;

PlaneBlocks::PlaneBlocks(storage::Store& store, uint32_t subgroup, std::span<std::byte> extent,
                         uint32_t memory_mask)
    : store_(&store),
      subgroup_(&store.layout().subgroups[subgroup]),
      extent_(extent),
      memory_mask_(memory_mask) {}

uint64_t PlaneBlocks::blocks() const {
  return (subgroup_->count + kBlockElements - 1) / kBlockElements;
}

uint64_t PlaneBlocks::elements(uint64_t block) const {
  return std::min(kBlockElements, subgroup_->count - block * kBlockElements);
}

base::Encoding PlaneBlocks::encoding(size_t plane) const {
  const storage::StoreLayout& layout = store_->layout();
  return base::plane_encoding(layout.format, layout.planes[plane]);
}

std::span<std::byte> PlaneBlocks::bytes(size_t plane, uint64_t block) const {
  const base::Encoding kind = encoding(plane);
  const uint64_t offset = store_->plane_offset(subgroup_->id, plane) +
                          block * base::encoded_bytes(kind, kBlockElements);
  return extent_.subspan(offset, base::encoded_bytes(kind, elements(block)));
}

base::Status PlaneBlocks::verify(size_t plane, uint64_t block) const {
  base::Status status = store_->verify_block(subgroup_->id, plane, block, bytes(plane, block));
  if (status.ok() || (memory_mask_ >> plane & 1u) == 0) return status;
  return base::Status(
      status.code(), "in the state cache " + status.what(),
      "It changed in this machine's memory: test that before you go on. With durability \"step\" "
      "the state on the drive is whole.");
}

void PlaneBlocks::seal(size_t plane, uint64_t block) const {
  store_->seal_block(subgroup_->id, plane, block, bytes(plane, block));
}

}  // namespace smartinf::csd
