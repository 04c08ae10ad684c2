#include "smartinf/storage/read_only.h"

#include <algorithm>
#include <cerrno>

#include <unistd.h>

#include "smartinf/base/units.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Result;
using base::Status;

// pread may stop early.
Result<size_t> read_at(const ReadOnlyContainer& container, uint64_t offset,
                       std::span<std::byte> out) {
  if (!container.file.is_open()) {
    const auto rest = container.memory.subspan(std::min<size_t>(offset, container.memory.size()));
    const auto here = rest.first(std::min(rest.size(), out.size()));
    std::copy(here.begin(), here.end(), out.begin());
    return here.size();
  }
  size_t got = 0;
  while (got < out.size()) {
    const ssize_t count = ::pread(container.file.get(), out.data() + got, out.size() - got,
                                  static_cast<off_t>(offset + got));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      return base::errno_status(errno, "cannot read", container.file_path, offset, out.size());
    }
    if (count == 0) break;
    got += static_cast<size_t>(count);
  }
  return got;
}

Result<FoundSuperblock> read_superblock(const ReadOnlyContainer& container) {
  std::vector<std::byte> area(kSuperblockAreaBytes);
  SI_ASSIGN_OR_RETURN(const size_t got, read_at(container, 0, area));
  FoundSuperblock found;
  Result<Superblock> chosen =
      choose_superblock(std::span<const std::byte>(area).first(got), &found.damaged);
  if (!chosen.ok()) {
    const Status& why = chosen.status();
    return Status(why.code() == ErrorCode::kMismatch ? why.code() : ErrorCode::kCorrupt,
                  "no copy of the superblock can be used: " + why.what(), why.advice(),
                  base::ErrorPlace{container.file_path, 0, area.size(), 0});
  }
  found.superblock = *chosen;
  return found;
}

Result<StoreLayout> read_layout(const ReadOnlyContainer& container, const Superblock& superblock) {
  const uint64_t stride = base::round_up(superblock.layout_bytes, base::kIoAlignment);
  if (stride > container.size_bytes) {
    return Status(ErrorCode::kCorrupt,
                  "the superblock says that the layout record is longer than the "
                  "container",
                  {}, base::ErrorPlace{container.file_path, {}, {}, 0});
  }
  std::vector<std::byte> record(stride);
  Result<StoreLayout> parsed = Status(ErrorCode::kCorrupt, "the layout record cannot be used");
  for (uint32_t copy = 0; copy < kLayoutCopies && !parsed.ok(); ++copy) {
    const uint64_t offset = kSuperblockAreaBytes + copy * stride;
    SI_ASSIGN_OR_RETURN(const size_t got, read_at(container, offset, record));
    parsed = parse_layout(std::span<const std::byte>(record).first(got), superblock);
  }
  if (!parsed.ok()) {
    return Status(
        ErrorCode::kCorrupt, parsed.status().what(), parsed.status().advice(),
        base::ErrorPlace{container.file_path, kSuperblockAreaBytes, kLayoutCopies * stride, 0});
  }
  return parsed;
}

StoreState state_of(const Superblock& superblock) {
  StoreState state;
  state.run.bytes = superblock.run;
  state.device_index = superblock.device_index;
  state.device_count = superblock.device_count;
  state.committed_step = superblock.committed_step;
  state.prepared_step = superblock.prepared_step;
  state.torn = superblock.in_place_step != 0;
  state.initialized = superblock.phase != Phase::kCreating && !state.torn;
  state.complete = superblock.phase == Phase::kComplete;
  state.copied_step = superblock.copied_step;
  return state;
}

}  // namespace smartinf::storage
