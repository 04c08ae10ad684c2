#include "smartinf/train/layer_stats.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <unordered_map>

#include <nlohmann/json.hpp>

namespace smartinf::train {

using torch::Tensor;

namespace {

/// Elements of a gradient that are copied to f64 at a time.
constexpr int64_t kGradientPiece = int64_t{1} << 20;

bool is_number(std::string_view word) {
  return !word.empty() &&
         std::ranges::all_of(word, [](unsigned char c) { return std::isdigit(c); });
}

}  // namespace

std::string layer_of(const std::string& parameter) {
  size_t begin = 0;
  while (begin < parameter.size()) {
    const size_t end = std::min(parameter.find('.', begin), parameter.size());
    if (is_number(std::string_view(parameter).substr(begin, end - begin))) {
      return parameter.substr(0, end);
    }
    begin = end + 1;
  }
  for (const std::string_view ending : {".weight", ".bias"}) {
    if (parameter.ends_with(ending)) return parameter.substr(0, parameter.size() - ending.size());
  }
  return parameter;
}

LayerStats::LayerStats(const plan::ParameterSpace& space) : space_(space) {
  std::unordered_map<std::string, size_t> by_name;
  std::vector<uint64_t> elements;
  for (const plan::ParameterRange& range : space.ranges()) {
    const std::string name = layer_of(range.name);
    const auto [found, is_new] = by_name.emplace(name, layers_.size());
    if (is_new) {
      layers_.emplace_back().name = name;
      elements.push_back(0);
    }
    parts_.push_back({found->second, elements[found->second]});
    elements[found->second] += range.count;
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    // Odd: with rows of an even width samples come from all columns.
    layers_[i].stride = (elements[i] + kSamplesMax - 1) / kSamplesMax | 1;
    layers_[i].samples.resize((elements[i] + layers_[i].stride - 1) / layers_[i].stride);
  }
}

void LayerStats::begin() {
  for (Layer& layer : layers_) {
    layer.gradient_squares.clear();
    layer.weight_squares = layer.sample_squares = layer.update_squares = 0;
  }
}

template <typename OnPart, typename OnSample>
void LayerStats::for_each(uint64_t first, std::span<const float> weights, OnPart on_part,
                          OnSample on_sample) {
  while (!weights.empty()) {
    const size_t index = space_.index_at(first);
    const plan::ParameterRange& range = space_.ranges()[index];
    const size_t count = std::min<uint64_t>(weights.size(), range.first + range.count - first);
    Layer& layer = layers_[parts_[index].layer];
    const uint64_t offset = parts_[index].offset + (first - range.first);
    on_part(layer, weights.first(count));
    const uint64_t next = (offset + layer.stride - 1) / layer.stride;  // the first sample in it
    for (uint64_t sample = next; sample * layer.stride < offset + count; ++sample) {
      on_sample(layer, layer.samples[sample], weights[sample * layer.stride - offset]);
    }
    weights = weights.subspan(count);
    first += count;
  }
}

void LayerStats::add_weights(uint64_t first, std::span<const float> weights) {
  for_each(
      first, weights,
      [](Layer& layer, std::span<const float> part) {
        for (const double weight : part) layer.weight_squares += weight * weight;
      },
      [](Layer& layer, float& sample, double weight) {
        sample = static_cast<float>(weight);
        layer.sample_squares += weight * weight;
      });
}

void LayerStats::add_updated_weights(uint64_t first, std::span<const float> weights) {
  for_each(
      first, weights, [](Layer&, std::span<const float>) {},
      [](Layer& layer, float sample, double weight) {
        const double update = weight - sample;
        layer.update_squares += update * update;
      });
}

void LayerStats::add_gradient(uint64_t first, const Tensor& gradient) {
  const torch::NoGradGuard no_grad;
  Layer& layer = layers_[parts_[space_.index_at(first)].layer];
  const Tensor flat_N = gradient.reshape({-1});
  for (int64_t i = 0; i < flat_N.numel(); i += kGradientPiece) {
    const Tensor piece_N = flat_N.narrow(0, i, std::min(kGradientPiece, flat_N.numel() - i));
    // Read at the end: an accelerator is not waited for here.
    layer.gradient_squares.push_back(
        piece_N.to(torch::kFloat64, /*non_blocking=*/false, /*copy=*/true).square_().sum());
  }
}

std::string LayerStats::to_json(base::StepNumber step, double gradient_scale) {
  nlohmann::ordered_json line{{"step", step}, {"layers", nlohmann::ordered_json::object()}};
  for (Layer& layer : layers_) {
    double gradient_squares = 0;
    for (const Tensor& squares : layer.gradient_squares) {
      gradient_squares += squares.item<double>();
    }
    layer.gradient_squares.clear();
    line["layers"][layer.name] = {
        {"gradient_norm", std::sqrt(gradient_squares) * gradient_scale},
        {"weight_norm", std::sqrt(layer.weight_squares)},
        // Not finite is null in JSON.
        {"update_ratio", std::sqrt(layer.update_squares / layer.sample_squares)}};
  }
  return line.dump();
}

}  // namespace smartinf::train
