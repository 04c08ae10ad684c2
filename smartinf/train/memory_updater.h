// optimizer.where = "memory": torch's own AdamW on f32 master weights in this process, behind the
// engine's interface. The trainer does not know the difference, so a comparison of the two sees the
// optimizer and nothing else.
#pragma once

#include <memory>
#include <string>

#include "smartinf/engine/updater.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

class MemoryUpdater : public engine::Updater {
 public:
  /// Opens the state in the folder `run`, or begins without one. Steps are committed in memory;
  /// save() keeps them. Errors: kUnsupported for another rule than AdamW; kMismatch when the file
  /// holds another model.
  static base::Result<std::unique_ptr<MemoryUpdater>> open(const kernels::RuleOptions& rule,
                                                           const plan::ParameterSpace& space,
                                                           const std::string& run);

  /// Writes the committed state to its file, all of it or nothing.
  virtual base::Status save() = 0;
};

}  // namespace smartinf::train
