#include "smartinf/storage/container.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/format.h"
#include "smartinf/storage/reserve_space.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

/// Signatures of file systems, partition tables and volume managers lie within so much of a block
/// device's start or end.
constexpr uint64_t kSignatureBytes = base::kMiB;

constexpr SpaceUse kForState{"the state",
                             "use another device or one more, a smaller state format, or "
                             "durability = \"none\" (half the space)"};
constexpr SpaceUse kForSpool{"the spool", "use another device or one more, or a smaller spool"};

/// A kind of file beside the state.
struct BesideState {
  std::string_view name;
  SpaceUse use;
};
constexpr SpaceUse kForRows{"rows of tables", "use another device or one more"};
constexpr BesideState kBesideState[] = {
    {kCacheFileName,
     {"keys and values", "use another device or one more, or fewer sequences at a time"}},
    {kRowFileName, kForRows},
    {kNewRowFileName, kForRows}};

const SpaceUse& use_of(std::string_view name) {
  return std::ranges::find(kBesideState, name, &BesideState::name)->use;
}

enum class PathKind { kMissing, kDirectory, kBlockDevice };

Result<PathKind> kind_of(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return PathKind::kMissing;
    return base::errno_status(errno, "cannot examine the device's path", path);
  }
  if (S_ISDIR(info.st_mode)) return PathKind::kDirectory;
  if (S_ISBLK(info.st_mode)) return PathKind::kBlockDevice;
  return Status(ErrorCode::kInvalidArgument,
                "a device is a directory or a block device, not a file",
                "Name a directory (a missing one is made) or a block device.",
                base::ErrorPlace{path, {}, {}, 0});
}

std::string join(const std::string& directory, std::string_view name) {
  return (std::filesystem::path(directory) / name).string();
}

/// Makes a missing directory with its missing parents, and all their entries durable.
Status make_directory(const std::string& path) {
  std::filesystem::path missing = std::filesystem::absolute(path).lexically_normal();
  std::vector<std::filesystem::path> to_make;
  while (!missing.empty() && !std::filesystem::exists(missing)) {
    to_make.push_back(missing);
    missing = missing.parent_path();
  }
  for (auto directory = to_make.rbegin(); directory != to_make.rend(); ++directory) {
    if (directory->filename().empty()) continue;  // a trailing slash
    if (mkdir(directory->c_str(), 0777) != 0 && errno != EEXIST) {
      return base::errno_status(errno, "cannot make the device's directory", directory->string(),
                                {}, {}, "Name a directory that can be written to.");
    }
    SI_RETURN_IF_ERROR(sync_directory(directory->parent_path().string()));
  }
  return Status();
}

/// The process that holds the lock on an open file, from the kernel's list; empty when it does not
/// say.
std::string holder_of(int descriptor) {
  struct stat info {};
  if (fstat(descriptor, &info) != 0) return {};
  const std::string wanted =
      fmt::format("{:02x}:{:02x}:{}", major(info.st_dev), minor(info.st_dev), info.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    // 1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
    std::vector<std::string> words;
    size_t at = 0;
    while ((at = line.find_first_not_of(' ', at)) != std::string::npos) {
      const size_t end = std::min(line.find(' ', at), line.size());
      words.push_back(line.substr(at, end - at));
      at = end;
    }
    if (words.size() > 5 && words[1] == "FLOCK" && words[5] == wanted) return words[4];
  }
  return {};
}

Status lock_file(int descriptor, const std::string& path) {
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) return Status();
  if (errno != EWOULDBLOCK) return base::errno_status(errno, "cannot lock the device", path);
  const std::string holder = holder_of(descriptor);
  return Status(ErrorCode::kBusy,
                holder.empty() ? "the device is in use by another process"
                               : fmt::format("the device is in use by process {}", holder),
                "Wait for it to end, or stop it, or use another device.",
                base::ErrorPlace{path, {}, {}, 0});
}

Result<FileDescriptor> lock_directory(const std::string& path) {
  const std::string lock_path = join(path, kLockFileName);
  FileDescriptor lock(
      open(lock_path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666));
  const int why = errno;
  if (!lock.is_open() && (why == EROFS || why == EACCES)) {
    // A process that may only read can still check and copy, and keep writers away meanwhile.
    lock = FileDescriptor(open(lock_path.c_str(), O_RDONLY | O_CLOEXEC));
    // On a file system that is read-only as a whole (checkpoints have no lock file).
    if (!lock.is_open() && why == EROFS) {
      lock = FileDescriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    }
    errno = why;
  }
  if (!lock.is_open()) {
    return base::errno_status(errno, "cannot make the device's lock file", lock_path, {}, {},
                              "The directory must be writable.");
  }
  SI_RETURN_IF_ERROR(lock_file(lock.get(), path));
  return lock;
}

/// How a file system says that it has no direct I/O; whatever else fails is a failure.
bool refuses_direct(int system_errno) {
  return system_errno == EINVAL || system_errno == EOPNOTSUPP;
}

/// Whether direct transfers work on this file. It must have at least kIoAlignment bytes.
Result<bool> direct_works(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_DIRECT | O_NONBLOCK | O_CLOEXEC));
  if (!file.is_open() && refuses_direct(errno)) return false;
  if (!file.is_open()) return base::errno_status(errno, "cannot open the device's state", path);
  SI_ASSIGN_OR_RETURN(const auto buffer, base::AlignedBuffer::allocate(base::kIoAlignment));
  const ssize_t got = pread(file.get(), buffer.data(), base::kIoAlignment, 0);
  if (got < 0 && !refuses_direct(errno)) {
    return base::errno_status(errno, "cannot read", path, 0, base::kIoAlignment);
  }
  return got == static_cast<ssize_t>(base::kIoAlignment);
}

/// A state is a regular file, or a link to one.
Status check_regular(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    return base::errno_status(errno, "cannot examine the device's state", path);
  }
  if (S_ISREG(info.st_mode)) return Status();
  return Status(ErrorCode::kInvalidArgument,
                "the device's state is not a regular file (a FIFO, a socket or a folder)",
                "Use another directory.", base::ErrorPlace{path, {}, {}, 0});
}

Result<uint64_t> size_of(int descriptor, PathKind kind, const std::string& path) {
  if (kind == PathKind::kBlockDevice) {
    uint64_t bytes = 0;
    if (ioctl(descriptor, BLKGETSIZE64, &bytes) != 0) {
      return base::errno_status(errno, "cannot determine the block device's size", path);
    }
    return bytes;
  }
  struct stat info {};
  if (fstat(descriptor, &info) != 0) return base::errno_status(errno, "cannot examine", path);
  return static_cast<uint64_t>(info.st_size);
}

/// The lock keeps others from the name, which the file has until it is open, with nothing in it.
Status add_spool_file(Container& container, uint64_t bytes) {
  SpoolFile& spool = container.spool.emplace();
  spool.path = join(container.path, kSpoolFileName);
  if (unlink(spool.path.c_str()) != 0 && errno != ENOENT) {
    return base::errno_status(errno, "cannot remove the rest of an earlier spool", spool.path);
  }
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | (container.direct ? O_DIRECT : 0);
  spool.descriptor = FileDescriptor(open(spool.path.c_str(), flags, 0600));
  if (!spool.descriptor.is_open() || unlink(spool.path.c_str()) != 0) {
    return base::errno_status(errno, "cannot make the spool's file", spool.path, {}, {},
                              "The directory must be writable.");
  }
  SI_RETURN_IF_ERROR(
      reserve_space(spool.descriptor.get(), bytes, kForSpool, container.path, spool.path));
  SI_ASSIGN_OR_RETURN(spool.index, container.ring->add_file(spool.descriptor.get(), spool.path));
  return Status();
}

/// Opens the state for transfers and gives it to a ring.
Status attach(Container& container, PathKind kind, const StoreOptions& options) {
  if (kind == PathKind::kDirectory) SI_RETURN_IF_ERROR(check_regular(container.file_path));
  SI_ASSIGN_OR_RETURN(container.direct, direct_works(container.file_path));
  if (!container.direct) {
    base::log(base::LogLevel::kInfo,
              fmt::format("{}: no direct I/O here; transfers go through the page cache",
                          container.file_path));
  }
  // O_EXCL on a block device: refused while it is mounted or part of a volume.
  const int flags = (options.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC |
                    (container.direct ? O_DIRECT : 0) |
                    (kind == PathKind::kBlockDevice ? O_EXCL : 0);
  container.state = FileDescriptor(open(container.file_path.c_str(), flags));
  if (!container.state.is_open()) {
    return base::errno_status(
        errno, "cannot open the device's state", container.file_path, {}, {},
        errno == EBUSY ? "The block device is mounted or part of a volume: unmount it first."
                       : "This user must be able to read and write it.");
  }
  // A block device is locked itself, there is no lock file. Through a descriptor of its own: the
  // ring holds on to that of the transfers, and a forked child to the ring.
  if (kind == PathKind::kDirectory) {
    container.lock.state =
        FileDescriptor(open(container.file_path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (!container.lock.state.is_open()) {
      return base::errno_status(errno, "cannot open the device's state", container.file_path);
    }
    SI_RETURN_IF_ERROR(lock_file(container.lock.state.get(), container.path));
  }
  SI_ASSIGN_OR_RETURN(container.size_bytes,
                      size_of(container.state.get(), kind, container.file_path));
  RingOptions ring_options = options.ring;
  ring_options.depth = std::max(ring_options.depth, 2 * options.io_depth + 8);
  SI_ASSIGN_OR_RETURN(container.ring, make_ring(ring_options));
  if (options.wrap_ring) container.ring = options.wrap_ring(std::move(container.ring));
  SI_ASSIGN_OR_RETURN(container.file,
                      container.ring->add_file(container.state.get(), container.file_path));
  if (options.spool_bytes > 0 && kind == PathKind::kDirectory) {
    SI_RETURN_IF_ERROR(add_spool_file(container, options.spool_bytes));
  }
  container.open_to_read = [path = container.path] { return open_container_to_read(path); };
  return Status();
}

Status read_fully(int descriptor, std::span<std::byte> bytes, uint64_t offset,
                  const std::string& path) {
  uint64_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = pread(descriptor, bytes.data() + done, bytes.size() - done,
                              static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return base::errno_status(errno, "cannot read", path, offset, bytes.size());
    if (got == 0) break;  // shorter than asked: the rest stays zero
    done += static_cast<uint64_t>(got);
  }
  return Status();
}

/// The best superblock of a file, or why there is none.
Result<Superblock> superblock_of(int descriptor, const std::string& path) {
  std::vector<std::byte> area(kSuperblockAreaBytes);
  SI_RETURN_IF_ERROR(read_fully(descriptor, area, 0, path));
  return choose_superblock(area);
}

/// Whether create() may use what lies here: nothing, or a creation that was not completed.
Status may_replace(int descriptor, const std::string& path) {
  const Result<Superblock> found = superblock_of(descriptor, path);
  if (!found.ok()) {
    if (found.status().code() == ErrorCode::kIo) return found.status();
    return Status(ErrorCode::kAlreadyExists,
                  fmt::format("the device holds a file that is not a readable store ({})",
                              found.status().what()),
                  "Check it with smartinf fsck, or use another device.",
                  base::ErrorPlace{path, {}, {}, 0});
  }
  if (found->phase != Phase::kComplete) {
    base::log(base::LogLevel::kInfo,
              fmt::format("{}: an earlier creation was interrupted; starting over", path));
    return Status();
  }
  return Status(ErrorCode::kAlreadyExists,
                fmt::format("the device already holds run {} at step {}",
                            RunId{found->run}.to_string(), found->committed_step),
                "Resume that run, or use another device.", base::ErrorPlace{path, {}, {}, 0});
}

Result<Container> create_in_directory(const std::string& path, uint64_t bytes,
                                      const StoreOptions& options) {
  SI_RETURN_IF_ERROR(make_directory(path));
  Container container;
  container.path = path;
  SI_ASSIGN_OR_RETURN(container.lock.file, lock_directory(path));
  const std::string final_path = join(path, kStateFileName);
  const std::string creating_path = join(path, kCreatingFileName);
  {
    const FileDescriptor existing(open(final_path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (existing.is_open()) {
      SI_RETURN_IF_ERROR(check_regular(final_path));
      SI_RETURN_IF_ERROR(lock_file(existing.get(), path));
      SI_RETURN_IF_ERROR(may_replace(existing.get(), path));
    } else if (errno != ENOENT) {
      return base::errno_status(errno, "cannot open the file on the device", final_path);
    }
  }
  // Both are leftovers now; their space counts as free.
  for (const std::string& leftover : {final_path, creating_path}) {
    if (unlink(leftover.c_str()) != 0 && errno != ENOENT) {
      return base::errno_status(errno, "cannot remove the rest of an earlier creation", leftover);
    }
  }
  {
    const FileDescriptor made(
        open(creating_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!made.is_open()) {
      return base::errno_status(errno, "cannot make the device's state", creating_path, {}, {},
                                "The directory must be writable.");
    }
    const Status reserved = reserve_space(made.get(), bytes, kForState, path, creating_path);
    if (!reserved.ok()) {
      (void)unlink(creating_path.c_str());
      return reserved;
    }
    // Size and extents are part of the inode, which later fdatasyncs of the contents need not
    // write.
    if (fsync(made.get()) != 0) {
      return base::errno_status(errno, "cannot make the reserved space durable", creating_path);
    }
  }
  container.file_path = creating_path;
  if (Status attached = attach(container, PathKind::kDirectory, options); !attached.ok()) {
    (void)unlink(creating_path.c_str());
    return attached;
  }
  container.file_path = final_path;
  container.publish = [path, creating_path, final_path]() -> Status {
    if (rename(creating_path.c_str(), final_path.c_str()) != 0) {
      return base::errno_status(errno, "cannot rename the device's state to its final name",
                                final_path);
    }
    return sync_directory(path);
  };
  return container;
}

Status is_blank(int descriptor, uint64_t size_bytes, const std::string& path) {
  std::vector<std::byte> bytes(std::min(kSignatureBytes, size_bytes));
  for (const uint64_t offset : {uint64_t{0}, size_bytes - bytes.size()}) {
    SI_RETURN_IF_ERROR(read_fully(descriptor, bytes, offset, path));
    if (std::any_of(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte{0}; })) {
      return Status(
          ErrorCode::kAlreadyExists, "the block device is not empty",
          "If nothing on it is needed, wipe it (wipefs, blkdiscard) or allow its use with "
          "force_block_device.",
          base::ErrorPlace{path, {}, {}, 0});
    }
  }
  return Status();
}

Result<Container> lock_block_device(const std::string& path) {
  Container container;
  container.path = path;
  container.file_path = path;
  container.lock.file = FileDescriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!container.lock.file.is_open()) {
    return base::errno_status(errno, "cannot open the block device", path, {}, {},
                              "This user must own it or be in its group.");
  }
  SI_RETURN_IF_ERROR(lock_file(container.lock.file.get(), path));
  return container;
}

Result<Container> create_on_block_device(const std::string& path, uint64_t bytes,
                                         const StoreOptions& options) {
  SI_ASSIGN_OR_RETURN(Container container, lock_block_device(path));
  SI_ASSIGN_OR_RETURN(const uint64_t size_bytes,
                      size_of(container.lock.file.get(), PathKind::kBlockDevice, path));
  if (size_bytes < bytes) return no_space(kForState, path, bytes, size_bytes);
  const Result<Superblock> found = superblock_of(container.lock.file.get(), path);
  if (found.ok()) {
    SI_RETURN_IF_ERROR(may_replace(container.lock.file.get(), path));
  } else if (!options.force_block_device) {
    SI_RETURN_IF_ERROR(is_blank(container.lock.file.get(), size_bytes, path));
  }
  SI_RETURN_IF_ERROR(attach(container, PathKind::kBlockDevice, options));
  return container;
}

Status missing(const std::string& path) {
  return Status(ErrorCode::kNotFound, "the device holds no state",
                "Check the path; a new run makes its state when it starts.",
                base::ErrorPlace{path, {}, {}, 0});
}

Status no_file(std::string_view name, const std::string& directory) {
  return Status(ErrorCode::kNotFound, fmt::format("there are no {}", use_of(name).what), {},
                base::ErrorPlace{directory, {}, {}, 0});
}

}  // namespace

Status sync_directory(const std::string& directory) {
  const FileDescriptor opened(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened.is_open() || fsync(opened.get()) != 0) {
    return base::errno_status(errno, "cannot make a directory entry durable", directory);
  }
  return Status();
}

Result<Container> create_container(const std::string& path, uint64_t bytes,
                                   const StoreOptions& options) {
  SI_ASSIGN_OR_RETURN(const PathKind kind, kind_of(path));
  if (kind == PathKind::kBlockDevice) return create_on_block_device(path, bytes, options);
  return create_in_directory(path, bytes, options);
}

Result<Container> open_container(const std::string& path, const StoreOptions& options) {
  SI_ASSIGN_OR_RETURN(const PathKind kind, kind_of(path));
  Container container;
  switch (kind) {
    case PathKind::kMissing:
      return missing(path);
    case PathKind::kBlockDevice: {
      SI_ASSIGN_OR_RETURN(container, lock_block_device(path));
      break;
    }
    case PathKind::kDirectory: {
      container.path = path;
      container.file_path = join(path, kStateFileName);
      // Asked before locking: a directory without a store is not given a lock file.
      if (access(container.file_path.c_str(), F_OK) != 0) return missing(path);
      SI_ASSIGN_OR_RETURN(container.lock.file, lock_directory(path));
      break;
    }
  }
  SI_RETURN_IF_ERROR(attach(container, kind, options));
  return container;
}

Result<ContainerLock> lock_container(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const PathKind kind, kind_of(path));
  if (kind == PathKind::kMissing) return missing(path);
  ContainerLock lock;
  if (kind == PathKind::kBlockDevice) {
    SI_ASSIGN_OR_RETURN(Container container, lock_block_device(path));
    return std::move(container.lock);
  }
  SI_ASSIGN_OR_RETURN(lock.file, lock_directory(path));
  for (const std::string_view name : {kStateFileName, kCreatingFileName}) {
    FileDescriptor state(open(join(path, name).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (!state.is_open()) continue;
    SI_RETURN_IF_ERROR(lock_file(state.get(), path));
    if (!lock.state.is_open()) lock.state = std::move(state);
  }
  return lock;
}

Result<CachePlace> open_cache_place(const std::string& directory, std::string_view name,
                                    uint64_t bytes, const StoreOptions& options) {
  SI_ASSIGN_OR_RETURN(const PathKind kind, kind_of(directory));
  const SpaceUse& use = use_of(name);
  if (kind != PathKind::kDirectory) {
    return Status(ErrorCode::kUnsupported, fmt::format("{} are kept in a directory", use.what),
                  "Name a directory on that drive.", base::ErrorPlace{directory, {}, {}, 0});
  }
  CachePlace place;
  place.directory = directory;
  place.path = join(directory, name);
  {
    const int make = bytes > 0 ? O_CREAT : 0;
    const FileDescriptor made(
        open(place.path.c_str(), O_RDWR | make | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666));
    if (!made.is_open() && errno == ENOENT && bytes == 0) return no_file(name, directory);
    if (!made.is_open()) {
      return base::errno_status(errno, fmt::format("cannot make the file of {}", use.what),
                                place.path, {}, {}, "The directory must be writable.");
    }
    SI_RETURN_IF_ERROR(check_regular(place.path));
    SI_ASSIGN_OR_RETURN(place.size_bytes, size_of(made.get(), kind, place.path));
    if (place.size_bytes < bytes) {
      SI_RETURN_IF_ERROR(reserve_space(made.get(), bytes - place.size_bytes, use, directory,
                                       place.path, place.size_bytes));
      SI_RETURN_IF_ERROR(sync_directory(directory));
      place.size_bytes = bytes;
    }
  }
  SI_ASSIGN_OR_RETURN(place.direct, direct_works(place.path));
  place.descriptor =
      FileDescriptor(open(place.path.c_str(), O_RDWR | O_CLOEXEC | (place.direct ? O_DIRECT : 0)));
  if (!place.descriptor.is_open()) {
    return base::errno_status(errno, fmt::format("cannot open the file of {}", use.what),
                              place.path);
  }
  SI_ASSIGN_OR_RETURN(place.ring, make_ring(options.ring));
  if (options.wrap_ring) place.ring = options.wrap_ring(std::move(place.ring));
  SI_ASSIGN_OR_RETURN(place.file, place.ring->add_file(place.descriptor.get(), place.path));
  return place;
}

Result<CachePlace> open_cache_to_read(const std::string& directory, std::string_view name) {
  CachePlace place;
  place.directory = directory;
  place.path = join(directory, name);
  place.descriptor =
      FileDescriptor(open(place.path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!place.descriptor.is_open()) {
    if (errno == ENOENT || errno == ENOTDIR) return no_file(name, directory);
    return base::errno_status(errno, fmt::format("cannot open the file of {}", use_of(name).what),
                              place.path);
  }
  SI_RETURN_IF_ERROR(check_regular(place.path));
  SI_ASSIGN_OR_RETURN(place.size_bytes,
                      size_of(place.descriptor.get(), PathKind::kDirectory, place.path));
  SI_ASSIGN_OR_RETURN(place.ring, make_ring({}));
  SI_ASSIGN_OR_RETURN(place.file, place.ring->add_file(place.descriptor.get(), place.path));
  return place;
}

Result<ReadOnlyContainer> open_container_to_read(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const PathKind kind, kind_of(path));
  if (kind == PathKind::kMissing) return missing(path);
  ReadOnlyContainer container;
  container.file_path = kind == PathKind::kDirectory ? join(path, kStateFileName) : path;
  container.file =
      FileDescriptor(open(container.file_path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!container.file.is_open()) {
    if (errno == ENOENT) return missing(path);
    return base::errno_status(errno, "cannot open the device's state", container.file_path);
  }
  if (kind == PathKind::kDirectory) SI_RETURN_IF_ERROR(check_regular(container.file_path));
  SI_ASSIGN_OR_RETURN(container.size_bytes,
                      size_of(container.file.get(), kind, container.file_path));
  return container;
}

}  // namespace smartinf::storage
