// Owner of the state on devices: the run and its step, read without opening them for a run. What
// `smartinf train` asks before it changes anything, and gc and inspect tell.
#pragma once

#include <optional>
#include <string>

#include "smartinf/base/ids.h"
#include "smartinf/engine/device_source.h"

namespace smartinf::engine {

struct FoundRun {
  storage::RunId run;
  base::StepNumber step = 0;
  std::string client_metadata;  // the trainer's, of that step; empty: it cannot be read
};

/// The run of the first device that holds a state to go on from. Nothing: none does; what is wrong
/// with them is said by whoever opens them. Locks and changes nothing; a run may be going
/// meanwhile.
std::optional<FoundRun> find_run(const DeviceSources& sources);

/// The run that the first of them with a state was made for, whether or not that was ever
/// completed. A device that no part of the model falls to holds none. Errors: those of reading
/// them.
base::Result<std::optional<storage::RunId>> run_made_for(const DeviceSources& sources);

}  // namespace smartinf::engine
