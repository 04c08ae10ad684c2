#include "smartinf/train/model.h"

#include <string>
#include <utility>

#include <torch/autograd.h>

#include "smartinf/base/check.h"

namespace smartinf::train {

using torch::Tensor;

/// Activation checkpoint: forward keeps the layer's input alone, backward computes the layer again.
/// Nothing in a layer is random, so the second run gives the bits of the first.
struct RecomputedLayer : torch::autograd::Function<RecomputedLayer> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x_BTC,
                        Model* model, int64_t layer) {
    context->save_for_backward({x_BTC});
    context->saved_data["model"] = reinterpret_cast<int64_t>(model);
    context->saved_data["layer"] = layer;
    const torch::NoGradGuard no_grad;
    return model->run_layer(model->layers_[static_cast<size_t>(layer)], x_BTC);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* model = reinterpret_cast<Model*>(context->saved_data["model"].toInt());
    const auto layer = static_cast<size_t>(context->saved_data["layer"].toInt());
    const torch::AutoGradMode with_grad(true);
    const Tensor x_BTC = context->get_saved_variables()[0].detach().requires_grad_(true);
    const Tensor y_BTC = model->run_layer(model->layers_[layer], x_BTC);
    torch::autograd::backward({y_BTC}, {gradients[0]});
    return {x_BTC.grad(), Tensor(), Tensor()};
  }
};

Model::Model(const ModelOptions& model, const plan::ParameterSpace& space, Tensor weights_N,
             uint32_t sequence, bool checkpoint_activations)
    : options_(model),
      checkpoint_activations_(checkpoint_activations),
      weights_N_(std::move(weights_N)) {
  const auto end_unit = [&] {
    const Parameter& last = parameters_.back();
    unit_ends_.push_back(last.first + static_cast<uint64_t>(last.weight.numel()));
  };
  embedding_VC_ = take(space, {"model.embed_tokens"});
  end_unit();
  for (uint32_t i = 0; i < model.layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    const std::string attention = layer + "self_attn.";
    layers_.push_back(
        {.attention_norm_C = take(space, {layer + "input_layernorm"}),
         .qkv_EC = take(space, {attention + "q_proj", attention + "k_proj", attention + "v_proj"}),
         .output_CC = take(space, {attention + "o_proj"}),
         .mlp_norm_C = take(space, {layer + "post_attention_layernorm"}),
         .gate_up_GC = take(space, {layer + "mlp.gate_proj", layer + "mlp.up_proj"}),
         .down_CF = take(space, {layer + "mlp.down_proj"})});
    end_unit();
  }
  final_norm_C_ = take(space, {"model.norm"});
  head_VC_ = model.tied_head ? embedding_VC_ : take(space, {"lm_head"});
  end_unit();

  // The first half of a head's elements turns against the second, as in Hugging Face's Llama.
  const auto half = static_cast<int64_t>(model.head_width() / 2);
  const auto f64 = torch::dtype(torch::kFloat64);
  const Tensor frequency_D =
      torch::pow(model.rope_base, -torch::arange(half, f64) / static_cast<double>(half));
  const Tensor angle_TD = torch::outer(torch::arange(int64_t{sequence}, f64), frequency_D);
  const auto table = [&](const Tensor& half_TD) {
    return torch::cat({half_TD, half_TD}, -1).unsqueeze(1).to(weights_N_.options());
  };
  cosine_T1D_ = table(angle_TD.cos());
  sine_T1D_ = table(angle_TD.sin());
}

Tensor Model::take(const plan::ParameterSpace& space, std::vector<std::string> names) {
  const plan::ParameterRange* first = space.find(names.front() + ".weight");
  SI_CHECK(first != nullptr, "a parameter that the space does not have: " + names.front());
  uint64_t count = 0;
  int64_t rows = 0;
  for (const std::string& name : names) {
    const plan::ParameterRange* range = space.find(name + ".weight");
    SI_CHECK(range != nullptr && range->first == first->first + count, "ranges are not adjacent");
    count += range->count;
    rows += static_cast<int64_t>(range->shape[0]);
  }
  const Tensor flat =
      weights_N_.narrow(0, static_cast<int64_t>(first->first), static_cast<int64_t>(count));
  const Tensor weight = (first->shape.size() == 1 ? flat : flat.view({rows, -1})).detach();
  weight.requires_grad_(true);
  parameters_.push_back({weight, first->first});
  return weight;
}

Tensor Model::rotated(const Tensor& x_BTHD) {
  const int64_t tokens = x_BTHD.size(1);
  const auto halves = x_BTHD.chunk(2, -1);
  const Tensor turned_BTHD = torch::cat({-halves[1], halves[0]}, -1);
  return x_BTHD * cosine_T1D_.narrow(0, 0, tokens) + turned_BTHD * sine_T1D_.narrow(0, 0, tokens);
}

Tensor Model::run_layer(const Layer& layer, const Tensor& x_BTC) {
  const int64_t heads = options_.heads;
  const int64_t kv_heads = options_.kv_heads;
  const int64_t head_width = options_.head_width();
  const at::IntArrayRef norm_shape = layer.attention_norm_C.sizes();

  Tensor h_BTC = torch::rms_norm(x_BTC, norm_shape, layer.attention_norm_C, options_.norm_eps);
  const auto qkv = torch::linear(h_BTC, layer.qkv_EC)
                       .unflatten(-1, {heads + 2 * kv_heads, head_width})
                       .split_with_sizes({heads, kv_heads, kv_heads}, 2);
  const Tensor attended_BHTD = torch::scaled_dot_product_attention(
      rotated(qkv[0]).transpose(1, 2), rotated(qkv[1]).transpose(1, 2), qkv[2].transpose(1, 2),
      /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true, /*scale=*/{},
      /*enable_gqa=*/kv_heads != heads);
  const Tensor y_BTC =
      x_BTC + torch::linear(attended_BHTD.transpose(1, 2).flatten(2), layer.output_CC);

  h_BTC = torch::rms_norm(y_BTC, norm_shape, layer.mlp_norm_C, options_.norm_eps);
  const auto gate_up = torch::linear(h_BTC, layer.gate_up_GC).chunk(2, -1);
  return y_BTC + torch::linear(torch::silu(gate_up[0]) * gate_up[1], layer.down_CF);
}

void Model::use(size_t unit) const {
  if (!before_use_) return;
  const uint64_t first = unit == 0 ? 0 : unit_ends_[unit - 1];
  before_use_(first, unit_ends_[unit] - first);
}

Tensor Model::logits(const Tensor& tokens_BT) {
  use(0);
  Tensor x_BTC = torch::embedding(embedding_VC_, tokens_BT);
  for (size_t i = 0; i < layers_.size(); ++i) {
    use(1 + i);
    x_BTC = checkpoint_activations_ && torch::GradMode::is_enabled()
                ? RecomputedLayer::apply(x_BTC, this, static_cast<int64_t>(i))
                : run_layer(layers_[i], x_BTC);
  }
  use(1 + layers_.size());
  x_BTC = torch::rms_norm(x_BTC, final_norm_C_.sizes(), final_norm_C_, options_.norm_eps);
  return torch::linear(x_BTC, head_VC_);
}

Tensor Model::loss(const Tensor& tokens_BT, const Tensor& targets_BT) {
  const Tensor logits_BTV = logits(tokens_BT);
  return torch::cross_entropy_loss(logits_BTV.flatten(0, 1).to(torch::kFloat32),
                                   targets_BT.flatten());
}

}  // namespace smartinf::train
