// Brings the weights of units to where the model computes: those that stay in memory, and those
// that pass through it on their way from the devices.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <torch/types.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/updater.h"
#include "smartinf/train/model.h"

namespace smartinf::train {

/// Threads: one caller.
class LayerStream {
 public:
  /// Memory for the weights is allocated here. `updater` and `model` outlive it.
  LayerStream(engine::Updater& updater, const Model& model, torch::Device accelerator,
              base::DataType type);

  /// Takes the committed step's weights into memory. Errors: the devices'.
  base::Status load();
  /// Where an update puts weights: engine::WeightsSink.
  void* weights_at(uint64_t element) const;
  /// An update was started: from now on get() gives the weights that it makes.
  void updated() { arrived_ = 0; }
  /// Waits until all weights in memory are those of the last update. Errors: of that update.
  base::Status wait_all() { return arrive(0, elements_); }

  /// A unit's weights, of the last update; waits for them. They stay as they are until the next
  /// update. Errors: StatusError.
  const UnitWeights& get(size_t unit);

  /// Seconds that get() and wait_all() have waited for updates.
  double waited_s() const { return waited_s_; }
  uint64_t host_bytes() const { return host_N_.nbytes(); }

 private:
  base::Status arrive(uint64_t first, uint64_t count);

  engine::Updater& updater_;
  const Model& model_;
  uint64_t elements_;
  base::DataType type_;
  torch::Tensor host_N_;              // where updates arrive; pinned beside a GPU
  torch::Tensor accelerator_N_;       // what the model uses; the same tensor without a GPU
  std::vector<UnitWeights> weights_;  // by unit: views of it
  uint64_t arrived_ = 0;  // elements from the first on that have the last update's weights
  double waited_s_ = 0;
};

}  // namespace smartinf::train
