// Any bytes as a layout record: a layout whose geometry holds together, or a typed error.
// Input: one byte of choices, then the record from behind magic, checksum and length.
#include <cstring>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/storage/format.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace smartinf::storage;
  constexpr size_t kBefore = offsetof(LayoutHeader, subgroup_count);
  if (size == 0) return 0;
  const bool seal = (data[0] & 1u) != 0;
  const uint32_t slots = 1 + (data[0] >> 1 & 1u);
  std::vector<std::byte> record(kBefore + size - 1);
  std::memcpy(record.data() + kBefore, data + 1, size - 1);
  Superblock superblock{};
  superblock.device_count = 3;
  superblock.layout_bytes = record.size();
  if (seal && record.size() >= sizeof(LayoutHeader)) {
    const uint64_t bytes = record.size();
    std::memcpy(record.data(), &kLayoutMagic, 8);
    std::memcpy(record.data() + offsetof(LayoutHeader, bytes), &bytes, 8);
    superblock.layout_checksum =
        smartinf::base::checksum(std::span<const std::byte>(record).subspan(16), kLayoutMagic);
    std::memcpy(record.data() + offsetof(LayoutHeader, checksum), &superblock.layout_checksum, 8);
  }
  const auto layout = parse_layout(record, superblock);
  if (!layout.ok()) return 0;
  SI_CHECK(encode_layout(*layout).size() == record.size(), "a layout that encodes otherwise");
  const auto geometry = Geometry::make(*layout, slots);
  if (!geometry.ok()) return 0;
  uint64_t end = geometry->table_offset(1, 1) + geometry->table_bytes_max();
  for (size_t i = 0; i < geometry->subgroups(); ++i) {
    SI_CHECK(geometry->extent_offset(i, 0) == end, "extents overlap or leave a gap");
    end += slots * geometry->extent_bytes(i);
    for (size_t plane = 0; plane < geometry->planes(); ++plane) {
      SI_CHECK(geometry->plane_offset(i, plane) + geometry->plane_bytes(i, plane) <=
                   geometry->plane_offset(i, plane + 1),
               "planes overlap");
    }
  }
  SI_CHECK(end <= geometry->container_bytes(), "extents beyond the container");
  return 0;
}
