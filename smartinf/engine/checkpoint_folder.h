// The folder of a checkpoint while it is not one: its name, its lock, what belongs in it, how it
// gets its final name and how it is taken away. Nothing here looks into a state.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "smartinf/base/status.h"
#include "smartinf/storage/file_descriptor.h"
#include "smartinf/storage/store.h"

namespace smartinf::engine {

inline constexpr std::string_view kCheckpointFile = "checkpoint.json";
/// A checkpoint that is being written or deleted has this behind its name; after a crash it is
/// nobody's loss.
inline constexpr std::string_view kPartialSuffix = ".partial";
/// Suffix of a checkpoint while another takes its place, where the file system cannot exchange two
/// names at once. Whole, and good to be used.
inline constexpr std::string_view kReplacedSuffix = ".replaced";

/// The folder that a path lies in.
std::string parent_folder(const std::string& path);
std::string device_folder(const std::string& checkpoint, size_t device);
/// Folder of a rank in a checkpoint that several ranks have written: it holds a checkpoint of its
/// own.
std::string rank_folder(const std::string& checkpoint, size_t rank);

enum class PartialFolder : uint8_t {
  kForeign,   // by its name, or by something in it, not a checkpoint that was not completed
  kInUse,     // a process is writing or deleting it
  kLeftover,  // of a process that is gone
};
/// Follows no link. A folder with the right name is foreign as soon as anything in it is not what a
/// checkpoint is made of.
PartialFolder look_at_partial(const std::string& folder);

/// Deletes a leftover. Errors: kBusy, kFailedPrecondition (it is no leftover; nothing is deleted),
/// kIo.
base::Status remove_partial(const std::string& folder);

/// Deletes a whole checkpoint, of this run. First it stops being one, so that a crash leaves no
/// half of it. Errors: kFailedPrecondition (something else is in it; nothing is deleted), kIo.
base::Status remove_checkpoint(const std::string& folder, const storage::RunId& run);

/// Something in the folder that no checkpoint is made of; empty: there is none. Follows no link.
std::string foreign_in_checkpoint(const std::string& folder);

/// Makes a folder and all above it that are missing, durably.
base::Status make_durable_folder(const std::string& folder);
base::Status sync_folder(const std::string& folder);

/// Waits for another process. Where the file system knows no locks nothing is locked: names that no
/// two processes share keep checkpoints apart there, too.
base::Result<storage::FileDescriptor> lock_checkpoints(const std::string& folder);

/// A folder that is being filled, beside where it will be; locked, so that nobody takes it for a
/// leftover. Unless it is named, nothing of it is left in the end.
class PartialCheckpoint {
 public:
  /// `path` will be its name, or one that begins with it. Its name until then holds the run's id
  /// and the process, so nobody else has it. Leftovers of earlier attempts are deleted: those of
  /// the same path, and with `of_run` those of the same run beside it. The parent is there.
  static base::Result<PartialCheckpoint> begin(const std::string& path, const storage::RunId& run,
                                               bool of_run);
  PartialCheckpoint(PartialCheckpoint&&) = default;
  PartialCheckpoint& operator=(PartialCheckpoint&&) = delete;
  ~PartialCheckpoint();

  const std::string& folder() const { return folder_; }

  /// Makes it `path`, durably; whatever is in it is durable already. With `replace` it takes the
  /// place of a checkpoint that is there, in one moment, and that one is deleted. Errors:
  /// kAlreadyExists (something that is not replaced), kIo.
  base::Status name(const std::string& path, bool replace);

 private:
  PartialCheckpoint() = default;

  std::string folder_;
  storage::FileDescriptor lock_;  // also says whether there is still something to take away
};

/// Whether a new checkpoint may be made at `path`: nothing is there, or an empty folder, or with
/// `replace` a checkpoint (also one that is damaged) and nothing else. Errors: kAlreadyExists.
base::Status check_place(const std::string& path, bool replace);

}  // namespace smartinf::engine
