// Norms of one step by layer, for the log: of gradients, weights and updates.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include "smartinf/base/ids.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::train {

/// The layer of a parameter, for people: its name up to the layer's number, "model.layers.3"; of
/// one outside of layers its name without ".weight" or ".bias".
std::string layer_of(const std::string& parameter);

/// Norms are L2, summed in f64. They are computed beside training and change nothing of it. Per
/// layer it keeps 64 KiB, and 8 MiB beside a gradient. Threads: one caller. Errors: torch throws.
class LayerStats {
 public:
  explicit LayerStats(const plan::ParameterSpace& space);

  /// A step begins; its weights follow.
  void begin();
  /// Master weights of elements [first, first + weights.size()), before the update and after it, in
  /// any order, each element once.
  void add_weights(uint64_t first, std::span<const float> weights);
  void add_updated_weights(uint64_t first, std::span<const float> weights);
  /// All of a parameter's gradient. Only reads it.
  void add_gradient(uint64_t first, const torch::Tensor& gradient);

  /// The step's line of the log, without a newline: {"step": .., "layers": {NAME: {"gradient_norm",
  /// "weight_norm", "update_ratio"}}}. Gradients are multiplied with gradient_scale. weight_norm is
  /// of the weights before the update. update_ratio is the update's norm over the weights' norm, of
  /// kSamplesMax elements of the layer; null where those weights are all zero.
  std::string to_json(base::StepNumber step, double gradient_scale);

 private:
  /// Elements that are looked at for the update: their ratio is right to about half a percent.
  static constexpr uint64_t kSamplesMax = uint64_t{1} << 14;

  struct Layer {
    std::string name;
    uint64_t stride = 1;  // of samples
    std::vector<torch::Tensor> gradient_squares;
    double weight_squares = 0;
    std::vector<float> samples;  // before the update
    double sample_squares = 0;
    double update_squares = 0;
  };
  /// A parameter, and where it stands among all elements of its layer.
  struct Part {
    size_t layer = 0;
    uint64_t offset = 0;
  };

  /// Calls on_part(layer, weights) for what is of one parameter, and on_sample(layer, its place in
  /// the layer's samples, weight) for each sample in it.
  template <typename OnPart, typename OnSample>
  void for_each(uint64_t first, std::span<const float> weights, OnPart on_part, OnSample on_sample);

  const plan::ParameterSpace& space_;
  std::vector<Layer> layers_;
  std::vector<Part> parts_;  // by range of the space
};

}  // namespace smartinf::train
