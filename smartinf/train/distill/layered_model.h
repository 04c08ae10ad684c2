// A model of a folder, of which one part at a time is in memory: the embedding, a layer, the head.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <torch/types.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"
#include "smartinf/model/weight_files.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/unit.h"
#include "smartinf/train/model.h"
#include "smartinf/train/unit_pass.h"

namespace smartinf::train {

/// A part of a model, as a model of one layer that computes it, and its weights.
struct ModelPart {
  Model model;
  UnitWeights weights;

  /// [B, T, C] -> [B, T, C], of a layer.
  torch::Tensor run(const torch::Tensor& x_BTC, const DocumentEnds& documents) const {
    return model.run_layers(1, weights, {}, x_BTC, documents);
  }
};

/// Threads: one caller. Errors: as StatusError; torch throws.
class LayeredModel {
 public:
  /// type, device: of weights and activations. sequence: tokens that a row has at most. Errors:
  /// those of model::WeightFiles::open().
  static base::Result<LayeredModel> open(const std::string& folder,
                                         const model::Architecture& architecture,
                                         base::DataType type, torch::Device device,
                                         uint32_t sequence);

  const model::Architecture& architecture() const { return architecture_; }
  const model::WeightFiles& files() const { return files_; }
  const plan::ParameterSpace& space() const { return space_; }
  uint32_t layers() const { return architecture_.layers; }
  /// Elements of the space.
  plan::Unit layer_span(uint32_t layer) const;

  /// A layer that computes with [N] weights.
  ModelPart layer(uint32_t layer, const torch::Tensor& weights_N) const;
  /// A layer with the folder's weights, which are read.
  ModelPart layer(uint32_t layer) const { return this->layer(layer, weights_of(layer)); }
  /// [N] weights of a layer, which are read.
  torch::Tensor weights_of(uint32_t layer) const { return read(layer_span(layer)); }
  /// [B, T] -> [B, T, C] of each batch.
  std::vector<torch::Tensor> embed(std::span<const Batch> batches) const;

  /// The final norm and the matrix of the logits. They have no gradients.
  struct Head {
    ModelPart norm;
    torch::Tensor matrix_VC;

    /// [B, T, C] -> [M, C], before the matrix.
    torch::Tensor normed(const torch::Tensor& x_BTC) const {
      return norm.model.final_norm(norm.weights, x_BTC);
    }
    torch::Tensor logits(const torch::Tensor& h_MC) const {
      return norm.model.logits(h_MC, matrix_VC);
    }
  };
  Head head() const;

  /// The mean loss in nats over all targets of the batches that count; brings each part once.
  double loss(std::span<const Batch> batches) const;

 private:
  LayeredModel(model::WeightFiles files, const model::Architecture& architecture,
               plan::ParameterSpace space, base::DataType type, torch::Device device,
               uint32_t sequence);
  Model of_one_layer(uint32_t layer, bool frozen) const;
  /// [N] weights of these elements.
  torch::Tensor read(const plan::Unit& span) const;

  model::WeightFiles files_;
  model::Architecture architecture_;
  plan::ParameterSpace space_;
  base::DataType type_;
  torch::Device device_;
  uint32_t sequence_;
  plan::Unit embedding_, head_;
  uint64_t layer_elements_ = 0;
};

}  // namespace smartinf::train
