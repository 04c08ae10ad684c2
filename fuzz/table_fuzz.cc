// Any bytes as a step's table on a fixed layout: accepted only if every record fits the geometry.
// Input: one byte of choices, then the table from behind magic and checksum.
#include <algorithm>
#include <cstring>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/storage/format.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace smartinf;
  using namespace smartinf::storage;
  static const Geometry geometry = [] {
    StoreLayout layout;
    layout.planes = {base::PlaneKind::kMaster, base::PlaneKind::kMomentum};
    layout.subgroups = {{base::SubgroupId{0}, 0, 70'000}, {base::SubgroupId{5}, 70'000, 9}};
    return *Geometry::make(layout, 2);
  }();
  constexpr size_t kBefore = offsetof(TableHeader, step);
  constexpr uint64_t kSeed = 11;
  if (size == 0) return 0;
  std::vector<std::byte> table(kBefore + size - 1);
  std::memcpy(table.data() + kBefore, data + 1, size - 1);
  std::memcpy(table.data(), &kTableMagic, 8);
  base::StepNumber step = 0;
  if (table.size() >= sizeof(TableHeader)) {
    TableHeader header;
    std::memcpy(&header, table.data(), sizeof(header));
    step = header.step;
    if ((data[0] & 1u) != 0) {
      const uint64_t end = std::min<uint64_t>(std::max<uint64_t>(header.bytes, 16), table.size());
      header.checksum =
          base::checksum(std::span<const std::byte>(table).subspan(16, end - 16), kSeed);
      std::memcpy(table.data(), &header, sizeof(header));
    }
  }
  if (!check_table(table, geometry, kSeed, step).ok()) return 0;
  for (size_t subgroup = 0; subgroup < geometry.subgroups(); ++subgroup) {
    for (size_t plane = 0; plane < geometry.planes(); ++plane) {
      const uint64_t offset = geometry.record_offset(subgroup, plane);
      SI_CHECK(offset + sizeof(PlaneRecord) + 8 * geometry.blocks(subgroup) <= table.size(),
               "a record beyond the table");
      PlaneRecord record;
      std::memcpy(&record, table.data() + offset, sizeof(record));
      SI_CHECK(record.slot < 2 && record.blocks == geometry.blocks(subgroup),
               "a bad record passed");
    }
  }
  return 0;
}
