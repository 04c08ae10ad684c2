#include "smartinf/storage/reserve_space.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"

namespace smartinf::storage {

using base::ErrorCode;
using base::Status;

namespace {

uint64_t free_bytes(const std::string& directory) {
  struct statfs info {};
  if (statfs(directory.c_str(), &info) != 0) return 0;
  return static_cast<uint64_t>(info.f_bavail) * static_cast<uint64_t>(info.f_bsize);
}

}  // namespace

Status no_space(const SpaceUse& use, const std::string& path, uint64_t needed, uint64_t available) {
  return Status(ErrorCode::kNoSpace,
                fmt::format("the device needs {} ({} bytes) for {}, and {} ({} bytes) are free",
                            base::format_bytes(needed), needed, use.what,
                            base::format_bytes(available), available),
                fmt::format("Free {} more, {}.",
                            base::format_bytes(needed - std::min(needed, available)), use.instead),
                base::ErrorPlace{path, {}, {}, 0});
}

Status reserve_space(int descriptor, uint64_t bytes, const SpaceUse& use,
                     const std::string& directory, const std::string& file_path,
                     uint64_t from_bytes) {
  struct statfs info {};
  if (from_bytes == 0 && fstatfs(descriptor, &info) == 0 && info.f_type == BTRFS_SUPER_MAGIC) {
    // In-place overwriting on a copy-on-write file system scatters the file, and writes what is
    // reserved elsewhere. Must be set while the file is empty.
    int flags = 0;
    if (ioctl(descriptor, FS_IOC_GETFLAGS, &flags) != 0 ||
        (flags |= FS_NOCOW_FL, ioctl(descriptor, FS_IOC_SETFLAGS, &flags)) != 0) {
      base::log(base::LogLevel::kWarning,
                fmt::format("{}: copy-on-write cannot be switched off, so writes may become slower",
                            file_path));
    }
  }
  const uint64_t available = free_bytes(directory);
  if (available < bytes) return no_space(use, directory, bytes, available);
  if (fallocate(descriptor, 0, static_cast<off_t>(from_bytes), static_cast<off_t>(bytes)) == 0) {
    return Status();
  }
  if (errno == ENOSPC || errno == EDQUOT)
    return no_space(use, directory, bytes, free_bytes(directory));
  if (errno != EOPNOTSUPP) {
    return base::errno_status(errno, "cannot reserve space", file_path, from_bytes, bytes);
  }
  // The file system cannot reserve: written zeros take the space.
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer zeros,
                      base::AlignedBuffer::allocate(4 * base::kMiB));
  for (uint64_t offset = 0; offset < bytes;) {
    const uint64_t length = std::min(zeros.size(), bytes - offset);
    const ssize_t written =
        pwrite(descriptor, zeros.data(), length, static_cast<off_t>(from_bytes + offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && (errno == ENOSPC || errno == EDQUOT)) {
      return no_space(use, directory, bytes, offset);
    }
    if (written < 0) {
      return base::errno_status(errno, "cannot reserve space", file_path, from_bytes + offset,
                                length);
    }
    offset += static_cast<uint64_t>(written);
  }
  return Status();
}

}  // namespace smartinf::storage
