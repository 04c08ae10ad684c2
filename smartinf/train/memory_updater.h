// optimizer.where = "memory": torch's own AdamW on f32 master weights in this process, behind the
// engine's interface. The trainer does not know the difference, so a comparison of the two sees the
// optimizer and nothing else.
#pragma once

#include <memory>
#include <string>

#include "smartinf/engine/updater.h"

namespace smartinf::train {

/// Opens the state in the folder `run`, or begins without one. Steps are committed in memory;
/// flush() writes the committed state to its file, all of it or nothing. Gradients cannot be
/// skipped, nor state edited, and abort() fails once an update has begun: the state is updated in
/// place. Errors: kUnsupported for another rule than AdamW; kMismatch when the file holds another
/// model.
base::Result<std::unique_ptr<engine::Updater>> open_memory_updater(
    const kernels::RuleOptions& rule, const plan::ParameterSpace& space, const std::string& run);

}  // namespace smartinf::train
