#include "smartinf/csd/local_state.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/log.h"
#include "smartinf/csd/store_snapshot.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/erase.h"

namespace smartinf::csd {

using base::Result;
using base::Status;
namespace fs = std::filesystem;

namespace {

/// In a directory whose state is replaced.
constexpr std::string_view kReplacementFolder = "smartinf.replacement";

/// A store with its directory, where that was made for it.
void discard(const std::string& path, bool with_directory) {
  const Status erased = storage::erase_store(path);
  if (!erased.ok()) base::log(base::LogLevel::kWarning, erased.to_string());
  if (with_directory) (void)::rmdir(path.c_str());
}

/// Where a new state is made, and what it takes the place of.
struct Place {
  std::string target;           // the device
  std::string made;             // the new state; elsewhere than target: beside the old one
  storage::ContainerLock lock;  // of the old one
  bool beside() const { return made != target; }
};

class LocalNewState final : public StoreNewState {
 public:
  LocalNewState(std::unique_ptr<storage::Store> store, Place place)
      : StoreNewState(std::move(store), place.made), place_(std::move(place)) {}
  ~LocalNewState() override {
    (void)close();
    if (!finished_) discard(place_.made, place_.beside());
  }

  // Rows come first, under another name: the state decides which of the two files is its own
  // (storage::open_row_file).
  Status take_place() override {
    if (!place_.beside()) return Status();
    if (has_tables()) {
      SI_RETURN_IF_ERROR(move_rows(made_rows(), new_rows()));
      SI_RETURN_IF_ERROR(storage::sync_directory(place_.target));
    }
    Status exchanged = exchange();
    if (!exchanged.ok() && has_tables()) (void)move_rows(new_rows(), made_rows());
    return exchanged;
  }
  Status give_back() override {
    if (!place_.beside()) return Status();
    SI_RETURN_IF_ERROR(exchange());
    return has_tables() ? move_rows(new_rows(), made_rows()) : Status();
  }
  Status finish() override {
    if (place_.beside()) {
      const std::string old_rows = (fs::path(place_.target) / storage::kRowFileName).string();
      std::error_code error;
      if (has_tables()) {
        SI_RETURN_IF_ERROR(move_rows(new_rows(), old_rows));
      } else {
        fs::remove(old_rows, error);
      }
      SI_RETURN_IF_ERROR(storage::sync_directory(place_.target));
      place_.lock.state.reset();  // of the old state, which lies in the other directory now
      discard(place_.made, true);
    }
    finished_ = true;
    return Status();
  }

 private:
  Status exchange() const {
    const std::string made = (fs::path(place_.made) / storage::kStateFileName).string();
    const std::string old = (fs::path(place_.target) / storage::kStateFileName).string();
    if (::renameat2(AT_FDCWD, made.c_str(), AT_FDCWD, old.c_str(), RENAME_EXCHANGE) == 0 ||
        ((errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) &&
         ::rename(made.c_str(), old.c_str()) == 0)) {
      return Status();
    }
    return base::errno_status(errno, "cannot put the new state in the old one's place", old);
  }

  std::string made_rows() const { return (fs::path(place_.made) / storage::kRowFileName).string(); }
  std::string new_rows() const {
    return (fs::path(place_.target) / storage::kNewRowFileName).string();
  }
  static Status move_rows(const std::string& from, const std::string& to) {
    if (::rename(from.c_str(), to.c_str()) == 0) return Status();
    return base::errno_status(errno, "cannot put the new tables in the old ones' place", to);
  }

  Place place_;
  bool finished_ = false;
};

}  // namespace

Result<std::unique_ptr<Snapshot>> open_local_snapshot(const std::string& path,
                                                      const std::string& name,
                                                      storage::ReaderLock lock) {
  SI_ASSIGN_OR_RETURN(auto reader, storage::StateReader::open(path, lock));
  return make_snapshot(std::move(reader), name,
                       [path](const storage::RunId& run, const std::string& record) {
                         return open_stored_tables(path, run, record);
                       });
}

Result<std::unique_ptr<NewState>> create_local_state(const std::string& path,
                                                     const std::string& name,
                                                     const storage::StoreLayout& layout,
                                                     const NewStateOptions& options,
                                                     storage::RingKind ring) {
  Place place{path, path, {}};
  std::error_code error;
  if (options.replace && fs::is_block_file(path, error)) {
    SI_RETURN_IF_ERROR(storage::erase_store(path));
  } else if (options.replace && fs::exists(fs::path(path) / storage::kStateFileName, error)) {
    SI_ASSIGN_OR_RETURN(place.lock, storage::lock_container(path));
    place.made = (fs::path(path) / kReplacementFolder).string();
    if (fs::exists(place.made, error)) discard(place.made, true);  // of an interrupted attempt
  }
  storage::StoreOptions store_options;
  store_options.ring.kind = ring;
  store_options.durability = options.durability;
  auto store = storage::Store::create(place.made, layout, store_options);
  if (!store.ok()) return std::move(store).status().with_context("device " + name);
  return std::unique_ptr<NewState>(
      std::make_unique<LocalNewState>(std::move(*store), std::move(place)));
}

std::string local_drive(const std::string& path) {
  struct stat info {};
  for (fs::path at = path; ::stat(at.empty() ? "." : at.c_str(), &info) != 0;) {
    if (!at.has_relative_path()) return {};
    at = at.parent_path();
  }
  return std::to_string(S_ISBLK(info.st_mode) ? info.st_rdev : info.st_dev);
}

}  // namespace smartinf::csd
