// The file or block device that holds a store: found, locked, checked to be ours, reserved. What is
// inside is format.h's and block_store.h's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "smartinf/base/status.h"
#include "smartinf/storage/file_descriptor.h"
#include "smartinf/storage/ring.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

/// In a directory: the state, and the file whose lock says that somebody uses it.
inline constexpr std::string_view kStateFileName = "smartinf.state";
inline constexpr std::string_view kLockFileName = "smartinf.lock";
/// Has the state's name once its superblock is on the drive; before that it is nobody's loss.
inline constexpr std::string_view kCreatingFileName = "smartinf.state.creating";

inline constexpr std::string_view kCacheFileName = "smartinf.cache";
inline constexpr std::string_view kRowFileName = "smartinf.rows";
/// Rows that take the others' place with the next state (row_file.h, open_row_file).
inline constexpr std::string_view kNewRowFileName = "smartinf.rows.new";

/// The spool's, for the moment between making it and taking its name away.
inline constexpr std::string_view kSpoolFileName = "smartinf.spool";

/// Files whose locks keep others away: the lock file and, in a directory, the state file itself, so
/// that a lock file that was deleted lets nobody in.
struct ContainerLock {
  FileDescriptor file;
  FileDescriptor state;
};

/// For reading only, without a lock and without direct I/O: a file, or memory that outlives it.
struct ReadOnlyContainer {
  std::string file_path;  // for messages
  FileDescriptor file;
  std::span<const std::byte> memory;  // where there is no file
  uint64_t size_bytes = 0;
};

/// Where the spool lies (StoreOptions::spool_bytes): a file of the ring that has no name any more.
struct SpoolFile {
  FileDescriptor descriptor;
  std::string path;  // for messages
  uint32_t index = 0;
};

/// Open and locked. Closing it (destruction) unlocks.
struct Container {
  std::string path;       // as the user named it
  std::string file_path;  // what transfers go to; for messages
  bool direct = false;    // transfers bypass the page cache and must be aligned
  uint64_t size_bytes = 0;
  std::unique_ptr<Ring> ring;
  uint32_t file = 0;  // of the ring

  ContainerLock lock;
  FileDescriptor state;
  /// In a directory, where a spool is asked for; elsewhere it lies behind the store.
  std::optional<SpoolFile> spool;
  /// Gives the container its final name, for good. Empty: it has it.
  std::function<base::Status()> publish;
  /// A way to the contents beside the ring, for reading (Store::read_committed). Empty: there is
  /// none.
  std::function<base::Result<ReadOnlyContainer>()> open_to_read;
};

/// Makes room for `bytes` at `path`: a new file in a directory, or an empty block device. Leftovers
/// of an interrupted creation are replaced. Errors: see Store::create.
base::Result<Container> create_container(const std::string& path, uint64_t bytes,
                                         const StoreOptions& options);
/// Errors: see Store::open.
base::Result<Container> open_container(const std::string& path, const StoreOptions& options);

base::Result<ReadOnlyContainer> open_container_to_read(const std::string& path);

/// A file beside the state: of a device's cache (cache_file.h) or rows of tables (row_file.h), with
/// a ring of its own. Closing it is its holder's.
struct CachePlace {
  std::string directory;      // for messages about its space
  std::string path;           // for messages
  FileDescriptor descriptor;  // none: memory of a fixed size
  std::unique_ptr<Ring> ring;
  uint32_t file = 0;  // of the ring
  bool direct = false;
  uint64_t size_bytes = 0;
};

/// Opens kCacheFileName, kRowFileName or kNewRowFileName in a directory whose device is open and so
/// locked, or makes an empty file, with space for `bytes` at least. bytes 0: it must be there.
/// Errors: kUnsupported, it is no directory; kNotFound, kNoSpace, kIo.
base::Result<CachePlace> open_cache_place(const std::string& directory, std::string_view name,
                                          uint64_t bytes, const StoreOptions& options);
/// The file in a directory, to be read whoever has it. Errors: kNotFound, there is none; kIo.
base::Result<CachePlace> open_cache_to_read(const std::string& directory, std::string_view name);

/// Makes the names in a directory durable.
base::Status sync_directory(const std::string& directory);

/// Takes the lock alone, until it is destroyed. Errors: kNotFound, kBusy (by whom), kIo.
base::Result<ContainerLock> lock_container(const std::string& path);

}  // namespace smartinf::storage
