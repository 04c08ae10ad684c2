// The parameters of low-rank adapters where the model computes; they always stay there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <torch/types.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/weight_source.h"
#include "smartinf/model/lora.h"
#include "smartinf/plan/unit.h"
#include "smartinf/train/model.h"
#include "smartinf/train/trained_weights.h"

namespace smartinf::train {

/// Threads: one caller.
class Adapters final : public TrainedWeights {
 public:
  /// source: of the adapters' weights; outlives this. units: the model's.
  Adapters(engine::WeightSource& source, std::span<const model::LoraTarget> targets,
           const model::LoraOptions& options, std::span<const plan::Unit> units,
           torch::Device accelerator, base::DataType type);

  /// Adapters of each layer of a unit; empty for the embedding and the head.
  std::span<const LayerAdapters> of(size_t unit) const { return by_unit_[unit]; }

  base::Status load() override;
  void* weights_at(uint64_t element) const override;
  void updated() override { arrived_ = false; }
  base::Status wait_all() override;

  /// Seconds that the caller has waited.
  double waited_s() const { return waited_s_; }

 private:
  void copy();

  engine::WeightSource& source_;
  const base::DataType type_;
  torch::Tensor host_N_;         // where updates arrive; pinned beside an accelerator
  torch::Tensor accelerator_N_;  // the same tensor without one
  std::vector<std::vector<LayerAdapters>> by_unit_;
  bool arrived_ = false;
  double waited_s_ = 0;
};

}  // namespace smartinf::train
