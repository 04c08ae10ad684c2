// The model that is trained and its weights where it computes: those that updates change, and those
// that stay as they are beside adapters.
#pragma once

#include <memory>
#include <span>

#include <torch/types.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/updater.h"
#include "smartinf/model/lora.h"
#include "smartinf/plan/unit.h"
#include "smartinf/train/adapters.h"
#include "smartinf/train/copy_streams.h"
#include "smartinf/train/embedding_table.h"
#include "smartinf/train/frozen_weights.h"
#include "smartinf/train/layer_stream.h"
#include "smartinf/train/model.h"

namespace smartinf::train {

/// Threads: one caller. After load() all is there.
class ModelWeights {
 public:
  ModelWeights(torch::Device accelerator, base::DataType type)
      : copies_(accelerator), type_(type) {}

  torch::Device accelerator() const { return copies_.device(); }
  /// Of all copies to and from the accelerator.
  const CopyStreams& copy_streams() const { return copies_; }
  base::DataType type() const { return type_; }
  torch::TensorOptions tensor_options() const;

  /// Sets the weights that adapters are beside: the model's own weights are then not trained.
  void freeze(std::unique_ptr<FrozenWeights> weights) { frozen_ = std::move(weights); }
  bool frozen() const { return frozen_ != nullptr; }

  struct Layout {
    const model::Architecture& architecture;
    uint32_t positions = 0;  // of a sequence
    std::span<const model::LoraTarget> targets;
    const model::LoraOptions& lora;
    const plan::UnitPlacement& placement;
    bool several_ranks = false;
    std::span<const uint32_t> only = {};  // units of this rank's stage; empty: all
  };
  /// Makes the model and takes the committed step's weights into memory. The updater lives until
  /// close(). Errors: the devices'; torch throws.
  base::Status load(engine::Updater& updater, const Layout& layout);
  /// Closes the stream after what computes is gone. Waits for what is being read; memory stays,
  /// which an update may write.
  void close() {
    if (stream_ != nullptr) stream_->close();
  }

  const Model& model() const { return *model_; }
  LayerStream& stream() { return *stream_; }
  Adapters* adapters() { return adapters_.get(); }
  /// The adapters, else the stream.
  TrainedWeights& trained() { return *trained_; }
  engine::WeightsSink sink() const {
    return [this](uint64_t first) { return trained_->weights_at(first); };
  }
  /// An update goes on only as the forward asks for its weights.
  bool updates_follow_forward() const { return adapters_ == nullptr && stream_->streams(); }

 private:
  const CopyStreams copies_;
  const base::DataType type_;
  std::unique_ptr<EmbeddingTable> table_;  // null: the embedding is a parameter
  std::unique_ptr<Model> model_;
  std::unique_ptr<FrozenWeights> frozen_;
  std::unique_ptr<LayerStream> stream_;
  std::unique_ptr<Adapters> adapters_;  // null: the model's own weights are trained
  TrainedWeights* trained_ = nullptr;
};

}  // namespace smartinf::train
