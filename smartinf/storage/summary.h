// Summary of a container, for people: `smartinf inspect`.
#pragma once

#include <cstdint>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

struct StoreSummary {
  StoreState state;
  StoreLayout layout;
  std::string file_path;  // where the bytes are
  uint64_t container_bytes = 0;
  uint32_t format_version = 0;
  uint32_t slots = 0;  // 2, or 1 with durability "none"
  uint64_t bytes_written_ever = 0;
  uint64_t created_seconds = 0;            // since 1970
  uint32_t superblock_copies = 0;          // that there are...
  uint32_t superblock_copies_damaged = 0;  // ...and of these, that cannot be read
};

/// Reads superblock and layout without locking or changing anything; a run may be going meanwhile.
/// Errors: kNotFound, kCorrupt, kMismatch (version), kIo.
base::Result<StoreSummary> summarize(const std::string& path);
base::Result<StoreSummary> summarize(const ReadOnlyContainer& container);

}  // namespace smartinf::storage
