#include "smartinf/storage/erase.h"

#include <cerrno>
#include <filesystem>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/file_descriptor.h"
#include "smartinf/storage/format.h"

namespace smartinf::storage {

using base::Status;

namespace {

Status wipe_block_device(const std::string& path) {
  auto container = open_container(path, StoreOptions{});
  if (!container.ok()) return std::move(container).status();
  SI_ASSIGN_OR_RETURN(const auto zeros, base::AlignedBuffer::allocate(kSuperblockAreaBytes));
  if (pwrite(container->state.get(), zeros.data(), zeros.size(), 0) !=
          static_cast<ssize_t>(zeros.size()) ||
      fdatasync(container->state.get()) != 0) {
    return base::errno_status(errno, "cannot wipe the device's superblocks", path, 0, zeros.size());
  }
  return Status();
}

}  // namespace

Status erase_cache(const std::string& directory) {
  const std::string file = (std::filesystem::path(directory) / kCacheFileName).string();
  if (access(file.c_str(), F_OK) != 0 && errno == ENOENT) return Status();
  SI_RETURN_IF_ERROR(lock_container(directory).status());
  if (unlink(file.c_str()) == 0 || errno == ENOENT) return Status();
  return base::errno_status(errno, "cannot delete", file);
}

Status erase_store(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_block_file(path, error)) return wipe_block_device(path);
  const std::filesystem::path directory(path);
  const std::string lock_path = (directory / kLockFileName).string();
  const FileDescriptor lock(open(lock_path.c_str(), O_RDWR | O_CLOEXEC));
  if (!lock.is_open() && errno != ENOENT) {
    return base::errno_status(errno, "cannot open the device's lock file", lock_path);
  }
  if (lock.is_open() && flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    // Opening says who holds it.
    auto holder = open_container(path, StoreOptions{});
    if (!holder.ok()) return std::move(holder).status();
    return Status(base::ErrorCode::kBusy, "the device was in use a moment ago", "Try again.",
                  base::ErrorPlace{path, {}, {}, 0});
  }
  for (const std::string_view name : {kStateFileName, kCreatingFileName}) {
    const FileDescriptor file(open((directory / name).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (!file.is_open() || flock(file.get(), LOCK_EX | LOCK_NB) == 0) continue;
    const auto holder = lock_container(path);
    if (!holder.ok()) return holder.status();
    return Status(base::ErrorCode::kBusy, "the device was in use a moment ago", "Try again.",
                  base::ErrorPlace{path, {}, {}, 0});
  }
  for (const std::string_view name :
       {kStateFileName, kCreatingFileName, kSpoolFileName, kCacheFileName, kRowFileName,
        kNewRowFileName, kLockFileName}) {
    const std::string file = (directory / name).string();
    if (unlink(file.c_str()) != 0 && errno != ENOENT) {
      return base::errno_status(errno, "cannot delete", file);
    }
  }
  return Status();
}

}  // namespace smartinf::storage
