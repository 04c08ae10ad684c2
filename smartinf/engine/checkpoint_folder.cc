#include "smartinf/engine/checkpoint_folder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/log.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;
using storage::FileDescriptor;
namespace fs = std::filesystem;

namespace {

constexpr size_t kRunDigits = 8;

bool is_number(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

bool is_run(std::string_view text) {
  return text.size() == kRunDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

/// "device" of "device-12"; the rest is a number.
std::string_view numbered(std::string_view name) {
  const size_t dash = name.rfind('-');
  if (dash == std::string_view::npos || !is_number(name.substr(dash + 1))) return {};
  return name.substr(0, dash);
}

/// The part of a partial folder's name before the run and the process; empty: it is none.
std::string_view base_of_partial(std::string_view name) {
  if (!name.ends_with(kPartialSuffix)) return {};
  name.remove_suffix(kPartialSuffix.size());
  const std::string_view with_run = numbered(name);
  const size_t dash = with_run.rfind('-');
  if (dash != std::string_view::npos && is_run(with_run.substr(dash + 1))) {
    return with_run.substr(0, dash);
  }
  // Before names carried run and process: step-00000100.partial, step-00000100-0a1b2c3d.partial.
  if (name.size() > kRunDigits + 1 && is_run(name.substr(name.size() - kRunDigits)) &&
      numbered(name.substr(0, name.size() - kRunDigits - 1)) == "step") {
    return name;
  }
  return numbered(name) == "step" ? name : std::string_view();
}

struct Contents {
  std::vector<fs::path> files;
  std::vector<fs::path> folders;  // each before what is in it
  std::vector<fs::path> partials;
  std::string foreign;  // the first thing that does not belong
};

bool is_checkpoint_file(std::string_view name) {
  // The last three are what Python wrote until version 0.1.
  return name == kCheckpointFile || name == "index.json" || name == "index.json.new" ||
         (name.starts_with("state-") && name.ends_with(".safetensors"));
}

enum class Level : uint8_t { kCheckpoint, kRank, kDevice };

void look_through(const fs::path& folder, Level level, Contents& contents) {
  contents.folders.push_back(folder);
  std::error_code error;
  auto entries = fs::directory_iterator(folder, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    std::error_code unknown;
    const fs::file_type type = entries->symlink_status(unknown).type();
    const bool file = type == fs::file_type::regular;
    if (level == Level::kDevice ? file && name.starts_with("smartinf.")
                                : file && is_checkpoint_file(name)) {
      contents.files.push_back(entries->path());
      continue;
    }
    const bool partial = base_of_partial(name).starts_with("rank-");
    if (level != Level::kDevice && type == fs::file_type::directory && numbered(name) == "device") {
      look_through(entries->path(), Level::kDevice, contents);
    } else if (level == Level::kCheckpoint && type == fs::file_type::directory &&
               (numbered(name) == "rank" || partial)) {
      if (partial) contents.partials.push_back(entries->path());
      look_through(entries->path(), Level::kRank, contents);
    } else {
      contents.foreign = entries->path().string();
    }
    if (!contents.foreign.empty()) return;
  }
  if (error) contents.foreign = folder.string();  // it cannot be known
}

Contents contents_of(const std::string& folder) {
  Contents contents;
  std::error_code error;
  if (fs::symlink_status(folder, error).type() != fs::file_type::directory) {
    contents.foreign = folder;
    return contents;
  }
  look_through(folder, Level::kCheckpoint, contents);
  return contents;
}

/// Files only that look_through() has named: what somebody puts there meanwhile stays.
Status remove(const Contents& contents) {
  for (const fs::path& file : contents.files) {
    if (::unlink(file.c_str()) != 0 && errno != ENOENT) {
      return base::errno_status(errno, "cannot delete", file.string());
    }
  }
  for (auto folder = contents.folders.rbegin(); folder != contents.folders.rend(); ++folder) {
    if (::rmdir(folder->c_str()) != 0 && errno != ENOENT) {
      return base::errno_status(errno, "cannot delete", folder->string());
    }
  }
  return Status();
}

Result<FileDescriptor> open_folder(const std::string& folder, int flags = 0) {
  FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags));
  if (!opened.is_open()) return base::errno_status(errno, "cannot open the folder", folder);
  return opened;
}

/// False: another process has it. True where the file system knows no locks.
bool try_lock(const FileDescriptor& folder) {
  return ::flock(folder.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

/// Locks of all that somebody might be writing; fewer than there are: it is in use.
bool lock_all(const std::string& folder, const Contents& contents,
              std::vector<FileDescriptor>& locks) {
  std::vector<fs::path> all = contents.partials;
  all.emplace_back(folder);
  return std::all_of(all.begin(), all.end(), [&](const fs::path& each) {
    auto opened = open_folder(each.string(), O_NOFOLLOW);
    if (!opened.ok() || !try_lock(*opened)) return false;
    locks.push_back(std::move(*opened));
    return true;
  });
}

std::string partial_name(const std::string& path, const storage::RunId& run) {
  return fmt::format("{}-{}-{}{}", path, run.to_string().substr(0, kRunDigits), ::getpid(),
                     kPartialSuffix);
}

Status not_only_ours(const std::string& what) {
  return Status(ErrorCode::kFailedPrecondition,
                "not a checkpoint, or not only that: nothing was deleted",
                "Look at what it is, or name another folder.",
                base::ErrorPlace{what, {}, {}, 0});
}

Status in_the_way(const std::string& path, std::string what, std::string advice) {
  return Status(ErrorCode::kAlreadyExists, std::move(what), std::move(advice),
                base::ErrorPlace{path, {}, {}, 0});
}

/// Exchanges the two in one moment. Where the file system cannot, the one at `path` steps aside
/// under a name that is a checkpoint's as well, so that at any moment one of them can be used.
Status trade_places(const std::string& partial, const std::string& path) {
  if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
    return Status();
  }
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) {
    return base::errno_status(errno, "cannot name the checkpoint", path);
  }
  const std::string aside = path + std::string(kReplacedSuffix);
  if (::rename(path.c_str(), aside.c_str()) != 0) {
    return base::errno_status(errno, "cannot rename the checkpoint to be replaced", path);
  }
  if (::rename(partial.c_str(), path.c_str()) != 0) {
    const int why = errno;
    (void)::rename(aside.c_str(), path.c_str());
    return base::errno_status(why, "cannot name the checkpoint", path);
  }
  SI_RETURN_IF_ERROR(sync_folder(parent_folder(path)));
  if (::rename(aside.c_str(), partial.c_str()) != 0) {
    return base::errno_status(errno, "cannot rename the checkpoint that was replaced", aside);
  }
  return Status();
}

}  // namespace

std::string parent_folder(const std::string& path) {
  const fs::path parent = fs::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

std::string device_folder(const std::string& checkpoint, size_t device) {
  return (fs::path(checkpoint) / fmt::format("device-{}", device)).string();
}

std::string rank_folder(const std::string& checkpoint, size_t rank) {
  return (fs::path(checkpoint) / fmt::format("rank-{}", rank)).string();
}

PartialFolder look_at_partial(const std::string& folder) {
  if (base_of_partial(fs::path(folder).filename().string()).empty()) return PartialFolder::kForeign;
  const Contents contents = contents_of(folder);
  if (!contents.foreign.empty()) return PartialFolder::kForeign;
  std::vector<FileDescriptor> locks;
  return lock_all(folder, contents, locks) ? PartialFolder::kLeftover : PartialFolder::kInUse;
}

Status remove_partial(const std::string& folder) {
  const Contents contents = contents_of(folder);
  const bool named = !base_of_partial(fs::path(folder).filename().string()).empty();
  if (!named || !contents.foreign.empty()) {
    return not_only_ours(named ? contents.foreign : folder);
  }
  std::vector<FileDescriptor> locks;
  if (!lock_all(folder, contents, locks)) {
    return Status(ErrorCode::kBusy, "a process is writing this checkpoint",
                  "Wait until it is done.", base::ErrorPlace{folder, {}, {}, 0});
  }
  return remove(contents);
}

Status remove_checkpoint(const std::string& folder, const storage::RunId& run) {
  const Contents contents = contents_of(folder);
  if (!contents.foreign.empty()) return not_only_ours(contents.foreign);
  const std::string doomed = partial_name(folder, run);
  if (::rename(folder.c_str(), doomed.c_str()) != 0) {
    return base::errno_status(errno, "cannot delete", folder);
  }
  return remove(contents_of(doomed));
}

std::string foreign_in_checkpoint(const std::string& folder) { return contents_of(folder).foreign; }

Status sync_folder(const std::string& folder) {
  SI_ASSIGN_OR_RETURN(const FileDescriptor opened, open_folder(folder));
  if (::fsync(opened.get()) == 0) return Status();
  return base::errno_status(errno, "cannot make the folder durable", folder);
}

Status make_durable_folder(const std::string& folder) {
  std::vector<fs::path> made;
  std::error_code error;
  fs::path missing = fs::absolute(folder, error).lexically_normal();
  if (!missing.has_filename()) missing = missing.parent_path();  // "runs/"
  for (; !fs::exists(missing, error) && missing.has_relative_path();
       missing = missing.parent_path()) {
    made.push_back(missing);
  }
  fs::create_directories(folder, error);
  if (error) {
    return base::errno_status(error.value(), "cannot make the folder", folder, {}, {},
                              "Name a folder that can be written to.");
  }
  for (const fs::path& each : made) {
    SI_RETURN_IF_ERROR(sync_folder(each.parent_path().string()));
  }
  return Status();
}

Result<FileDescriptor> lock_checkpoints(const std::string& folder) {
  SI_ASSIGN_OR_RETURN(FileDescriptor opened, open_folder(folder));
  while (::flock(opened.get(), LOCK_EX) != 0 && errno == EINTR) {
  }
  return opened;
}

Result<PartialCheckpoint> PartialCheckpoint::begin(const std::string& path,
                                                   const storage::RunId& run, bool of_run) {
  const std::string name = fs::path(path).filename().string();
  const std::string run_digits = run.to_string().substr(0, kRunDigits);
  std::error_code error;
  std::vector<std::string> leftovers;
  for (const auto& entry : fs::directory_iterator(parent_folder(path), error)) {
    const std::string other = entry.path().filename().string();
    const std::string_view base = base_of_partial(other);
    const bool same_run = of_run && base.starts_with("step-") &&
                          other.substr(base.size()).starts_with(fmt::format("-{}-", run_digits));
    if (!base.empty() && (base == name || same_run)) leftovers.push_back(entry.path().string());
  }
  for (const std::string& leftover : leftovers) {
    if (look_at_partial(leftover) != PartialFolder::kLeftover) continue;
    if (const Status removed = remove_partial(leftover); !removed.ok()) {
      base::log(base::LogLevel::kWarning,
                fmt::format("a checkpoint that was left incomplete cannot be deleted: {}",
                            removed.to_string()));
    }
  }
  PartialCheckpoint partial;
  partial.folder_ = partial_name(path, run);
  // Until it is locked another process may take it for a leftover, and delete it.
  struct stat made {};
  do {
    if (::mkdir(partial.folder_.c_str(), 0777) != 0) {
      return base::errno_status(errno, "cannot make the checkpoint's folder", partial.folder_, {},
                                {}, "Name a folder that can be written to.");
    }
    auto opened = open_folder(partial.folder_);
    if (!opened.ok()) continue;
    (void)try_lock(*opened);
    partial.lock_ = std::move(*opened);
  } while (!partial.lock_.is_open() || ::stat(partial.folder_.c_str(), &made) != 0);
  return partial;
}

PartialCheckpoint::~PartialCheckpoint() {
  if (!lock_.is_open()) return;
  std::error_code error;
  fs::remove_all(folder_, error);  // its own, made by begin()
  if (error) {
    base::log(base::LogLevel::kWarning,
              fmt::format("{}: what is left of a failed checkpoint cannot be deleted: {}", folder_,
                          error.message()));
  }
}

Status PartialCheckpoint::name(const std::string& path, bool replace) {
  // A folder is renamed in the place of an empty one only.
  const bool named = ::rename(folder_.c_str(), path.c_str()) == 0;
  const int why = errno;
  if (!named) {
    if (why != EEXIST && why != ENOTEMPTY && why != ENOTDIR) {
      return base::errno_status(why, "cannot name the checkpoint", path);
    }
    SI_RETURN_IF_ERROR(check_place(path, replace));
    SI_RETURN_IF_ERROR(trade_places(folder_, path));
  }
  lock_.reset();  // from here on folder_ is gone, or it is the old one's
  // The parent may be as new as the checkpoint, made by whoever keeps it there.
  const std::string parent = parent_folder(path);
  SI_RETURN_IF_ERROR(sync_folder(parent));
  (void)sync_folder(parent_folder(fs::absolute(parent).lexically_normal().string()));
  if (!named) {  // the old one goes when the new one is there for good
    const Status removed = remove_partial(folder_);
    if (!removed.ok()) {
      base::log(base::LogLevel::kWarning,
                fmt::format("the checkpoint that was replaced cannot be deleted: {}",
                            removed.to_string()));
    }
  }
  return Status();
}

Status check_place(const std::string& path, bool replace) {
  std::error_code error;
  const fs::file_type type = fs::symlink_status(path, error).type();
  if (type == fs::file_type::not_found) return Status();
  if (type != fs::file_type::directory) {
    return in_the_way(path, "there is something here that is not a folder", "Name another folder.");
  }
  const Contents contents = contents_of(path);
  if (!contents.foreign.empty()) {
    return in_the_way(contents.foreign, "the folder for the checkpoint holds something else",
                      "Give the checkpoint a folder of its own.");
  }
  if (contents.files.empty() && contents.folders.size() == 1) return Status();
  if (replace) return Status();
  return in_the_way(path, "a checkpoint is here already",
                    "Give another folder, or say that it is to be replaced (replace=True).");
}

}  // namespace smartinf::engine
