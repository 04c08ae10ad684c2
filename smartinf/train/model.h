// A decoder-only transformer of the Llama architecture, unit by unit: what each unit computes with
// the weights that it is given. Who brings the weights is layer_stream.h, who runs the units after
// each other is unit_pass.h.
//
// Shapes are in the names: B sequences, T tokens, C model.width, V model.vocabulary, H heads, K
// heads of keys and values, D head width, N elements of a unit; E is (H + 2K) D, query, key and
// value side by side; G is 2 model.mlp_width, gate and up side by side; M is B T.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <torch/types.h>

#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/unit.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// A leaf of autograd: a span of the space, one or several ranges that one matrix product uses
/// together.
struct Parameter {
  torch::Tensor weight;
  uint64_t first = 0;  // element of the space
};
/// The parameters of a unit, in the order of the space, which they cover without gaps.
using UnitWeights = std::vector<Parameter>;

/// Threads: one caller; torch's own threads work inside. Errors: torch throws.
class Model {
 public:
  /// weights: their type and device, which are those of activations too. model has its defaults.
  Model(const ModelOptions& model, const plan::ParameterSpace& space,
        const torch::TensorOptions& weights, uint32_t sequence);

  /// The embedding, layers, and the final norm with the head (which may be the embedding's).
  std::span<const plan::Unit> units() const { return units_; }
  size_t head() const { return units_.size() - 1; }
  bool tied_head() const { return options_.tied_head; }
  /// Views of weights_N, all weights of a unit.
  UnitWeights weights_of(size_t unit, const torch::Tensor& weights_N) const;

  /// Element of the space at which a unit's parameter begins.
  uint64_t first_of(size_t unit, size_t parameter) const { return shapes_[unit][parameter].first; }

  /// Unit 0: [B, T] int64 -> [B, T, C].
  torch::Tensor embed(const UnitWeights& embedding, const torch::Tensor& tokens_BT) const;
  /// A unit of layers: [B, T, C] -> [B, T, C].
  torch::Tensor run_layers(size_t unit, const UnitWeights& layers, torch::Tensor x_BTC) const;
  /// The last unit's norm: [B, T, C] -> [M, C].
  torch::Tensor final_norm(const UnitWeights& head, const torch::Tensor& x_BTC) const;
  /// The matrix that makes logits of that. embedding: unit 0, where the head is tied to it.
  const torch::Tensor& head_matrix(const UnitWeights& head, const UnitWeights& embedding) const {
    return options_.tied_head ? embedding.front().weight : head.back().weight;
  }

 private:
  torch::Tensor run_layer(std::span<const Parameter> layer, const torch::Tensor& x_BTC) const;
  torch::Tensor rotated(const torch::Tensor& x_BTHD) const;

  struct Shape {
    uint64_t first = 0;  // element of the space
    uint64_t count = 0;
    std::vector<int64_t> sizes;
  };
  static Shape shape_at(const plan::ParameterSpace& space, uint64_t first);

  ModelOptions options_;
  std::vector<plan::Unit> units_;
  std::vector<std::vector<Shape>> shapes_;  // by unit
  torch::Tensor cosine_T1D_, sine_T1D_;     // of the rotary angles; both halves of D alike
};

}  // namespace smartinf::train
