// The weights that updates change, as the training loop sees them: all of the model's, which a
// LayerStream brings, or those of its adapters.
#pragma once

#include <cstdint>

#include "smartinf/base/status.h"

namespace smartinf::train {

/// Threads: one caller.
class TrainedWeights {
 public:
  virtual ~TrainedWeights() = default;

  /// Takes the committed step's weights into memory. Errors: the devices'.
  virtual base::Status load() = 0;
  /// Where an update puts weights: engine::WeightsSink; null for those that do not stay in memory.
  virtual void* weights_at(uint64_t element) const = 0;
  /// An update was started or aborted: what is computed from now on has the weights that it makes.
  virtual void updated() = 0;
  /// Waits until the weights in memory are those of the last update. Errors: of that update.
  virtual base::Status wait_all() = 0;
};

}  // namespace smartinf::train
