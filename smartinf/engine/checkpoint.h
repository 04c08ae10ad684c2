// Copies of a committed state, kept in a folder: FOLDER/step-00000100/device-0/smartinf.state and
// so on, with checkpoint.json beside them. Each device in it is a store of its own, so inspect,
// fsck, restore and reshard read a checkpoint as they read a run.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/engine/stored_run.h"

namespace smartinf::engine {

inline constexpr std::string_view kCheckpointFile = "checkpoint.json";
/// A checkpoint being written has this behind its name; after a crash it is nobody's loss.
inline constexpr std::string_view kPartialSuffix = ".partial";

struct CheckpointOptions {
  std::string folder;  // made if missing
  uint64_t keep = 0;   // newest checkpoints of this run to keep; 0: all
  uint64_t memory_budget_bytes = uint64_t{256} << 20;
  std::vector<std::span<std::byte>> lent_memory;  // instead: see ReshardOptions
  storage::RingKind ring = storage::RingKind::kAuto;
  StateProgress progress;
};

struct CheckpointSummary {
  std::string path;
  base::StepNumber step = 0;
  uint64_t state_bytes = 0;
  bool cloned = false;   // shares its blocks with the devices: the file system made a reflink
  bool existed = false;  // it was there already, and stays as it is
  uint64_t blocks_without_checksum = 0;
  std::vector<std::string> removed;  // older ones, beyond `keep`
};

/// Copies the state of `run`. Where the file system can, by reflink: at once, and without space of
/// its own until the run overwrites; the copied blocks are not read then. Else block by block
/// through the budget, each checked and sealed anew. Either all of it or nothing is there: it is
/// written under another name, made durable, then renamed.
/// Errors: kNoSpace, kCorrupt (a damaged block: nothing is kept), kIo.
base::Result<CheckpointSummary> write_checkpoint(StoredRun& run, const CheckpointOptions& options);

/// The same for devices that this process has open: between wait_commit() and the next begin_step()
/// nobody writes to them.
base::Result<CheckpointSummary> checkpoint_open_run(const std::vector<std::string>& paths,
                                                    const CheckpointOptions& options);

/// Makes the folder for checkpoints if missing, and finds out whether it can be written to.
/// Errors: kInvalidArgument, kIo.
base::Status check_checkpoint_folder(const std::string& folder);

/// What a checkpoint's folder says of itself.
struct Checkpoint {
  std::string path;
  storage::RunId run;
  base::StepNumber step = 0;
  uint64_t created_seconds = 0;      // since 1970
  std::vector<std::string> devices;  // paths to open, in the run's order
};
bool is_checkpoint(const std::string& path);
/// Errors: kNotFound, kCorrupt.
base::Result<Checkpoint> read_checkpoint(const std::string& path);
/// Those in a folder, oldest step first; what is none is passed over.
std::vector<Checkpoint> list_checkpoints(const std::string& folder);

}  // namespace smartinf::engine
