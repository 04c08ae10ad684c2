#include "smartinf/storage/summary.h"

#include <bit>

#include "smartinf/storage/read_only.h"

namespace smartinf::storage {

base::Result<StoreSummary> summarize(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const ReadOnlyContainer container, open_container_to_read(path));
  return summarize(container);
}

base::Result<StoreSummary> summarize(const ReadOnlyContainer& container) {
  SI_ASSIGN_OR_RETURN(const FoundSuperblock found, read_superblock(container));
  StoreSummary summary;
  summary.state = state_of(found.superblock);
  summary.file_path = container.file_path;
  summary.container_bytes = container.size_bytes;
  summary.format_version = found.superblock.version;
  summary.slots = found.superblock.slots;
  summary.bytes_written_ever = found.superblock.bytes_written_ever;
  summary.created_seconds = found.superblock.created_seconds;
  summary.superblock_copies = kSuperblockCopies;
  summary.superblock_copies_damaged = static_cast<uint32_t>(std::popcount(found.damaged));
  // An interrupted creation may not have come to the layout; there is nothing to say of it then.
  if (found.superblock.phase == Phase::kCreating) return summary;
  SI_ASSIGN_OR_RETURN(summary.layout, read_layout(container, found.superblock));
  return summary;
}

}  // namespace smartinf::storage
