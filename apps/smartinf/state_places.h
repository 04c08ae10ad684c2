// Places of states, as the commands for states take them on the command line: a device, a run's
// folder with all its devices, or a checkpoint's; a memory budget. And whose state it is that lies
// there.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/config/recipe.h"
#include "smartinf/serve/options.h"

namespace smartinf::apps {

/// Whether the path is the folder of a training run.
bool is_run_folder(const std::string& path);

/// Whether a run has begun in the folder: its recipe is then the one that the run keeps.
bool has_begun(const std::string& folder);

/// The recipe that a run's folder keeps, with the values it trained with, as of where the folder is
/// now: of one that was copied or moved, train.run and the devices inside are the copy's, from any
/// working directory. What a flag gives counts, and with a flag for train.run nothing follows.
base::Result<config::LoadedRecipe> load_run(const std::string& folder,
                                            std::span<const config::Override> overrides = {});

/// Puts the devices of a checkpoint, which can only be read, in place of the run's. path: its
/// folder, or one that holds several, of which the newest is taken. Errors: kNotFound; of
/// engine::read_checkpoint() and check_devices(); kUnsupported where the run's state is in memory.
base::Status use_checkpoint(const std::string& path, config::Recipe& recipe);

/// The devices of each word in turn. Nothing is opened. remote: filled in from the recipe of a
/// run's folder where it says nothing yet. Errors: a run's recipe or a checkpoint's description
/// that cannot be read; a checkpoint that was put together from others.
base::Result<std::vector<std::string>> devices_of(const std::vector<std::string>& words,
                                                  serve::RemoteOptions* remote = nullptr);

/// The writer of a state, as the client metadata of its step says.
struct StateOwner {
  enum class Kind : uint8_t { kUnknown, kTrain, kPython };
  Kind kind = Kind::kUnknown;
  std::string folder;  // kTrain: of the run, absolute; empty: of a version that did not say
};
StateOwner owner_of(const std::string& client_metadata);
/// "the run in runs/own", "a state written from Python"; empty: not known.
std::string owner_text(const StateOwner& owner);

/// The value of --memory-budget. Errors: kInvalidArgument, also for what nothing can work with.
base::Result<uint64_t> memory_budget(const std::string& text);

}  // namespace smartinf::apps
