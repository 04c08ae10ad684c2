// A decoder-only transformer of the Llama architecture, over weights that live in one flat tensor.
//
// Shapes are in the names: B sequences, T tokens, C model.width, V model.vocabulary, H heads, K
// heads of keys and values, D head width, N elements of the parameter space; E is (H + 2K) D,
// query, key and value side by side; G is 2 model.mlp_width, gate and up side by side.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <torch/types.h>

#include "smartinf/plan/parameter_space.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// A leaf of autograd: a span of the flat weights, one or several ranges that one matrix product
/// uses together.
struct Parameter {
  torch::Tensor weight;  // a view of the flat tensor
  uint64_t first = 0;    // element of the space
};

/// Threads: one caller; torch's own threads work inside. Errors: torch throws.
class Model {
 public:
  /// `weights_N` is the flat tensor; who writes into it changes the model. model has its defaults.
  Model(const ModelOptions& model, const plan::ParameterSpace& space, torch::Tensor weights_N,
        uint32_t sequence, bool checkpoint_activations);
  Model(const Model&) = delete;  // backward passes hold its address
  Model& operator=(const Model&) = delete;

  /// before_use(first, count): called in each forward before the weights of these elements of the
  /// space are read: for the embedding, for every layer, for what follows them. What it throws ends
  /// the forward. Empty: the weights are there.
  void set_before_use(std::function<void(uint64_t, uint64_t)> before_use) {
    before_use_ = std::move(before_use);
  }

  /// Shapes: [B, T] int64 -> [B, T, V] of the weights' type.
  torch::Tensor logits(const torch::Tensor& tokens_BT);
  /// Mean cross-entropy in nats, f32, of targets [B, T].
  torch::Tensor loss(const torch::Tensor& tokens_BT, const torch::Tensor& targets_BT);

  /// In the order of the space, which they cover without gaps.
  std::vector<Parameter>& parameters() { return parameters_; }

 private:
  friend struct RecomputedLayer;
  struct Layer {
    torch::Tensor attention_norm_C, qkv_EC, output_CC, mlp_norm_C, gate_up_GC, down_CF;
  };
  torch::Tensor take(const plan::ParameterSpace& space, std::vector<std::string> names);
  torch::Tensor run_layer(const Layer& layer, const torch::Tensor& x_BTC);
  void use(size_t unit) const;
  torch::Tensor rotated(const torch::Tensor& x_BTHD);

  ModelOptions options_;
  bool checkpoint_activations_;
  torch::Tensor weights_N_;
  std::vector<Parameter> parameters_;
  std::vector<uint64_t> unit_ends_;  // embedding, layers, the rest: element behind each
  std::function<void(uint64_t, uint64_t)> before_use_;
  torch::Tensor embedding_VC_;
  std::vector<Layer> layers_;
  torch::Tensor final_norm_C_;
  torch::Tensor head_VC_;
  torch::Tensor cosine_T1D_, sine_T1D_;  // of the rotary angles; both halves of D alike
};

}  // namespace smartinf::train
