// Any bytes as a container's first 256 KiB: a superblock or a typed error, never worse.
// Input: one byte of choices, then the superblock; a short one is filled up with zeros.
#include <algorithm>
#include <cstring>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/storage/format.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace smartinf::storage;
  if (size == 0) return 0;
  const bool seal = (data[0] & 1u) != 0;  // behind a right checksum the other checks are reached
  Superblock superblock{};
  std::memcpy(static_cast<void*>(&superblock), data + 1, std::min(size - 1, sizeof(superblock)));
  static std::vector<std::byte> area(kSuperblockAreaBytes);
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    std::memset(area.data() + superblock_offset(copy), 0, sizeof(superblock));
    if ((data[0] >> (1 + copy) & 1u) == 0) continue;
    if (seal) {
      superblock.magic = kSuperblockMagic;
      superblock.copy = copy;
      ++superblock.sequence;
      seal_superblock(superblock);
    }
    std::memcpy(area.data() + superblock_offset(copy), &superblock, sizeof(superblock));
  }
  uint32_t bad = 0;
  const auto chosen = choose_superblock(area, &bad);
  if (chosen.ok()) {
    SI_CHECK(chosen->readable_since <= kFormatVersion, "a superblock of a format that is too new");
    SI_CHECK(chosen->prepared_step - chosen->committed_step <= 1, "steps that do not follow");
    SI_CHECK(chosen->device_index < chosen->device_count, "a device outside its run");
    SI_CHECK(bad != (1u << kSuperblockCopies) - 1, "chosen, and all are bad");
  }
  return 0;
}
