// Copies of a committed state, kept in a folder: FOLDER/step-00000100/device-0/smartinf.state and
// so on, with checkpoint.json beside them. Each device in it is a store of its own, so inspect,
// fsck, restore and reshard read a checkpoint as they read a run. Where several ranks each have a
// run of their own (Python), rank-0, rank-1 and so on are such folders, and the checkpoint.json
// above them says which belong together.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/checkpoint_folder.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/engine/stored_run.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {

struct CheckpointOptions {
  std::string folder;  // of all checkpoints, each with a name of its own; made if missing
  uint64_t keep = 0;   // newest checkpoints of this run to keep there; 0: all
  /// The folder of this one, instead. With `replace` a checkpoint that is there makes room once the
  /// new one is whole and durable: at any moment one of the two is there.
  std::string path;
  bool replace = false;
  std::string trainer;  // kept with it: the caller's own text (Checkpoint::trainer)
  uint64_t memory_budget_bytes = uint64_t{256} << 20;
  std::vector<std::span<std::byte>> scratch_memory;  // instead: see ReshardOptions
  storage::RingKind ring = storage::RingKind::kAuto;
  StateProgress progress;
};

struct CheckpointSummary {
  std::string path;
  base::StepNumber step = 0;
  uint64_t state_bytes = 0;
  bool cloned = false;   // shares its blocks with the devices: the file system made a reflink
  bool existed = false;  // the checkpoint was there already, and stays as it is
  uint64_t blocks_without_checksum = 0;
  std::vector<std::string> removed;  // older ones, beyond `keep`
};

/// Copies the state of `run`. Where the file system can, by reflink: at once, and without space of
/// its own until the run overwrites; the copied blocks are not read then. Else block by block
/// through the budget, each checked and sealed anew. Either all of it or nothing is there: it is
/// written under another name, made durable, then renamed, and the folder around it made durable.
/// Errors: kNoSpace, kCorrupt (a damaged block: nothing is kept), kAlreadyExists, kIo.
base::Result<CheckpointSummary> write_checkpoint(StoredRun& run, const CheckpointOptions& options);

/// The same of an updater's devices, through their own memory. After flush(), before the next
/// begin_step(): nobody writes to them then. Several ranks that share the updater's run write one
/// checkpoint, each its own devices, into a folder that all of them see; it is like that of one
/// process. Errors: and those of Updater::snapshot().
base::Result<CheckpointSummary> write_checkpoint(Updater& updater, CheckpointOptions options);

/// Makes the folder for checkpoints if missing, and finds out whether it can be written to.
/// Errors: kInvalidArgument, kIo.
base::Status check_checkpoint_folder(const std::string& folder);

/// A checkpoint as its folder describes it.
struct Checkpoint {
  std::string path;
  storage::RunId run;
  base::StepNumber step = 0;
  uint64_t created_seconds = 0;      // since 1970
  std::vector<std::string> devices;  // paths to open, in the run's order
  std::string trainer;               // CheckpointOptions::trainer
  std::vector<Checkpoint> ranks;     // of several: run, step and devices are theirs
};
bool is_checkpoint(const std::string& path);
/// Errors: kNotFound, kCorrupt; kMismatch for ranks that were not written together.
base::Result<Checkpoint> read_checkpoint(const std::string& path);
/// The checkpoints in a folder, oldest step first; what is none is passed over.
std::vector<Checkpoint> list_checkpoints(const std::string& folder);

/// Whether the devices are those that the description speaks of: run, step, number and place.
/// Devices that cannot be looked at are passed over: opening them says why. Errors: kMismatch.
base::Status check_devices(const Checkpoint& checkpoint);
/// Errors: kUnsupported for one of several ranks, of which each is a run of its own.
base::Status check_one_rank(const Checkpoint& checkpoint);
/// Opens a checkpoint of one rank for reading, which needs no lock: nobody writes to it.
/// Errors: of check_devices() and open_stored_run(); kUnsupported for one of several ranks.
base::Result<StoredRun> open_checkpoint(const Checkpoint& checkpoint);
/// Errors: kFailedPrecondition for a device inside a checkpoint, which is no place to train on.
base::Status refuse_checkpoint_device(const std::string& device);

/// A checkpoint of several ranks, as the first of them makes it: each writes its own at
/// rank_folder(folder(), its number), then finish() makes them one. Unless it is finished, nothing
/// is left.
class RanksCheckpoint {
 public:
  /// run: of the first rank. Errors: kAlreadyExists, kIo.
  static base::Result<RanksCheckpoint> begin(const std::string& path, bool replace,
                                             const storage::RunId& run);
  const std::string& folder() const { return partial_.folder(); }
  /// Errors: of a rank's checkpoint that is missing or damaged; kIo.
  base::Status finish(size_t ranks, const std::string& trainer);

 private:
  RanksCheckpoint(PartialCheckpoint partial, std::string path, bool replace)
      : partial_(std::move(partial)), path_(std::move(path)), replace_(replace) {}

  PartialCheckpoint partial_;
  std::string path_;
  bool replace_;
};

}  // namespace smartinf::engine
