// Looking at a container that is not ours to change: peek and summarize.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

struct FoundSuperblock {
  Superblock superblock;
  uint32_t damaged = 0;  // a bit per copy that cannot be used
};

/// The newest good copy. Errors: kCorrupt, kMismatch (version), kIo.
base::Result<FoundSuperblock> read_superblock(const ReadOnlyContainer& container);

/// The layout record: the first copy that is what the superblock says. Errors: kCorrupt, kIo.
base::Result<StoreLayout> read_layout(const ReadOnlyContainer& container,
                                      const Superblock& superblock);

/// Reads at an offset; fewer bytes than asked for only at the container's end. Errors: kIo.
base::Result<size_t> read_at(const ReadOnlyContainer& container, uint64_t offset,
                             std::span<std::byte> out);

StoreState state_of(const Superblock& superblock);

}  // namespace smartinf::storage
