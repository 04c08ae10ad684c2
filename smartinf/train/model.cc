#include "smartinf/train/model.h"

#include <algorithm>
#include <string>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/train/parameters.h"

namespace smartinf::train {

using torch::Tensor;

Model::Model(const ModelOptions& model, const plan::ParameterSpace& space,
             const torch::TensorOptions& weights, uint32_t sequence)
    : options_(model), units_(model_units(model, space)) {
  for (const plan::Unit& unit : units_) {
    std::vector<Shape>& shapes = shapes_.emplace_back();
    for (uint64_t first = unit.first; first < unit.end(); first += shapes.back().count) {
      shapes.push_back(shape_at(space, first));
    }
  }

  // The first half of a head's elements turns against the second, as in Hugging Face's Llama.
  const auto half = static_cast<int64_t>(model.head_width() / 2);
  const auto f64 = torch::dtype(torch::kFloat64);
  const Tensor frequency_D =
      torch::pow(model.rope_base, -torch::arange(half, f64) / static_cast<double>(half));
  const Tensor angle_TD = torch::outer(torch::arange(int64_t{sequence}, f64), frequency_D);
  const auto table = [&](const Tensor& half_TD) {
    return torch::cat({half_TD, half_TD}, -1).unsqueeze(1).to(weights);
  };
  cosine_T1D_ = table(angle_TD.cos());
  sine_T1D_ = table(angle_TD.sin());
}

/// The parameter that begins there: query, key and value, or gate and up, are one.
Model::Shape Model::shape_at(const plan::ParameterSpace& space, uint64_t first) {
  const plan::ParameterRange& range = space.at(first);
  SI_CHECK(range.first == first, "a unit that begins within a parameter");
  Shape shape{first, range.count, {range.shape.begin(), range.shape.end()}};
  const auto joined = [&](std::string_view name) { return range.name.ends_with(name); };
  const size_t more = joined("q_proj.weight") ? 2 : joined("gate_proj.weight") ? 1 : 0;
  for (size_t i = 0; i < more; ++i) {
    const plan::ParameterRange& next = space.at(shape.first + shape.count);
    shape.count += next.count;
    shape.sizes.front() += static_cast<int64_t>(next.shape.front());
  }
  return shape;
}

UnitWeights Model::weights_of(size_t unit, const Tensor& weights_N) const {
  UnitWeights weights;
  for (const Shape& shape : shapes_[unit]) {
    const Tensor flat = weights_N.narrow(0, static_cast<int64_t>(shape.first - units_[unit].first),
                                         static_cast<int64_t>(shape.count));
    weights.push_back({flat.view(shape.sizes).detach().requires_grad_(true), shape.first});
  }
  return weights;
}

Tensor Model::rotated(const Tensor& x_BTHD) const {
  const int64_t tokens = x_BTHD.size(1);
  const auto halves = x_BTHD.chunk(2, -1);
  const Tensor turned_BTHD = torch::cat({-halves[1], halves[0]}, -1);
  return x_BTHD * cosine_T1D_.narrow(0, 0, tokens) + turned_BTHD * sine_T1D_.narrow(0, 0, tokens);
}

Tensor Model::run_layer(std::span<const Parameter> layer, const Tensor& x_BTC) const {
  const Tensor& attention_norm_C = layer[0].weight;
  const Tensor& qkv_EC = layer[1].weight;
  const Tensor& output_CC = layer[2].weight;
  const Tensor& mlp_norm_C = layer[3].weight;
  const Tensor& gate_up_GC = layer[4].weight;
  const Tensor& down_CF = layer[5].weight;
  const int64_t heads = options_.heads;
  const int64_t kv_heads = options_.kv_heads;
  const int64_t head_width = options_.head_width();
  const at::IntArrayRef norm_shape = attention_norm_C.sizes();

  Tensor h_BTC = torch::rms_norm(x_BTC, norm_shape, attention_norm_C, options_.norm_eps);
  const auto qkv = torch::linear(h_BTC, qkv_EC)
                       .unflatten(-1, {heads + 2 * kv_heads, head_width})
                       .split_with_sizes({heads, kv_heads, kv_heads}, 2);
  const Tensor attended_BHTD = torch::scaled_dot_product_attention(
      rotated(qkv[0]).transpose(1, 2), rotated(qkv[1]).transpose(1, 2), qkv[2].transpose(1, 2),
      /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true, /*scale=*/{},
      /*enable_gqa=*/kv_heads != heads);
  const Tensor y_BTC = x_BTC + torch::linear(attended_BHTD.transpose(1, 2).flatten(2), output_CC);

  h_BTC = torch::rms_norm(y_BTC, norm_shape, mlp_norm_C, options_.norm_eps);
  const auto gate_up = torch::linear(h_BTC, gate_up_GC).chunk(2, -1);
  return y_BTC + torch::linear(torch::silu(gate_up[0]) * gate_up[1], down_CF);
}

Tensor Model::embed(const UnitWeights& embedding, const Tensor& tokens_BT) const {
  return torch::embedding(embedding.front().weight, tokens_BT);
}

Tensor Model::run_layers(size_t unit, const UnitWeights& layers, Tensor x_BTC) const {
  const size_t of_layer = layers.size() / units_[unit].layers;
  for (size_t i = 0; i < layers.size(); i += of_layer) {
    x_BTC = run_layer(std::span(layers).subspan(i, of_layer), x_BTC);
  }
  return x_BTC;
}

Tensor Model::final_norm(const UnitWeights& head, const Tensor& x_BTC) const {
  const Tensor& norm_C = head.front().weight;
  return torch::rms_norm(x_BTC, norm_C.sizes(), norm_C, options_.norm_eps).flatten(0, 1);
}

}  // namespace smartinf::train
