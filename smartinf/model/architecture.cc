#include "smartinf/model/architecture.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include <fmt/format.h>

namespace smartinf::model {
namespace {

// Names of a family's tensors, without ".weight" and ".bias".
struct Names {
  std::string_view embedding = "model.embed_tokens";
  std::string_view layers = "model.layers";
  std::string_view attention_norm = "input_layernorm";
  std::string_view output = "self_attn.o_proj";
  std::string_view attention_post_norm = "post_attention_layernorm";
  std::string_view mlp_norm = "post_attention_layernorm";
  std::string_view mlp_post_norm = "post_feedforward_layernorm";
  std::string_view router = "mlp.gate";
  std::string_view expert = "mlp.experts";
  std::string_view gate = "gate_proj";
  std::string_view up = "up_proj";
  std::string_view down = "down_proj";
  std::string_view final_norm = "model.norm";
};

Names names_of(Family family) {
  Names names;
  switch (family) {
    case Family::kGemma2:
    case Family::kGemma3:
      names.mlp_norm = "pre_feedforward_layernorm";
      break;
    case Family::kGpt2:
      names.embedding = "transformer.wte";
      names.layers = "transformer.h";
      names.attention_norm = "ln_1";
      names.output = "attn.c_proj";
      names.mlp_norm = "ln_2";
      names.final_norm = "transformer.ln_f";
      break;
    case Family::kMixtral:
      names.router = "block_sparse_moe.gate";
      names.expert = "block_sparse_moe.experts";
      names.gate = "w1";
      names.up = "w3";
      names.down = "w2";
      break;
    default:
      break;
  }
  return names;
}

// Appends tensors in order; matrices are random, vectors one or zero.
class TensorList {
 public:
  explicit TensorList(const Architecture& model) : model_(model) {}

  void matrix(Part part, std::string name, uint64_t out, uint64_t in, double scale = 1) {
    std::vector<uint64_t> shape{out, in};
    if (model_.transposed && part != Part::kEmbedding && part != Part::kPositions) {
      std::swap(shape[0], shape[1]);
    }
    tensors_.push_back(
        {part, std::move(name) + ".weight", std::move(shape), scale * model_.init_std, 0});
  }
  void norm(Part weight, Part bias, const std::string& name, uint64_t width) {
    const float one = model_.norm == Norm::kRmsPlusOne ? 0.0f : 1.0f;
    tensors_.push_back({weight, name + ".weight", {width}, 0, one});
    if (model_.norm == Norm::kLayer) this->bias(bias, name, width);
  }
  void bias(Part part, const std::string& name, uint64_t width) {
    tensors_.push_back({part, name + ".bias", {width}, 0, 0});
  }
  std::vector<Tensor> take() { return std::move(tensors_); }

 private:
  const Architecture& model_;
  std::vector<Tensor> tensors_;
};

void add_attention(const Architecture& model, const Names& names, const std::string& layer,
                   double into_residual, TensorList& list) {
  list.norm(Part::kAttentionNorm, Part::kAttentionNormBias,
            layer + std::string(names.attention_norm), model.width);
  using Projection = std::pair<std::string, uint64_t>;
  std::vector<Projection> projections{{"self_attn.q_proj", model.query_width()},
                                      {"self_attn.k_proj", model.kv_width()},
                                      {"self_attn.v_proj", model.kv_width()}};
  if (model.family == Family::kGpt2) projections = {{"attn.c_attn", 3 * uint64_t{model.width}}};
  for (const auto& [name, width] : projections) {
    list.matrix(Part::kQkv, layer + name, width, model.width);
  }
  for (const auto& [name, width] : projections) {
    if (model.qkv_bias) list.bias(Part::kQkvBias, layer + name, width);
  }
  if (model.query_key_norm) {
    list.norm(Part::kQueryNorm, {}, layer + "self_attn.q_norm", model.head_width);
    list.norm(Part::kKeyNorm, {}, layer + "self_attn.k_norm", model.head_width);
  }
  const std::string output = layer + std::string(names.output);
  list.matrix(Part::kOutput, output, model.width, model.query_width(), into_residual);
  if (model.output_bias) list.bias(Part::kOutputBias, output, model.width);
  if (model.norm_after) {
    list.norm(Part::kAttentionPostNorm, {}, layer + std::string(names.attention_post_norm),
              model.width);
  }
}

void add_feed_forward(const Architecture& model, const Names& names, const std::string& prefix,
                      double into_residual, TensorList& list) {
  std::vector<std::string> first{prefix + std::string(names.gate), prefix + std::string(names.up)};
  std::string down = prefix + std::string(names.down);
  if (model.family == Family::kGpt2) {
    first = {prefix + "c_fc"};
    down = prefix + "c_proj";
  }
  for (const std::string& name : first) {
    list.matrix(Part::kGateUp, name, model.mlp_width, model.width);
  }
  for (const std::string& name : first) {
    if (model.mlp_bias) list.bias(Part::kGateUpBias, name, model.mlp_width);
  }
  list.matrix(Part::kDown, down, model.width, model.mlp_width, into_residual);
  if (model.mlp_bias) list.bias(Part::kDownBias, down, model.width);
}

void add_layer(const Architecture& model, const Names& names, uint32_t index, TensorList& list) {
  const std::string layer = fmt::format("{}.{}.", names.layers, index);
  const double into_residual = 1 / std::sqrt(2.0 * model.layers);
  add_attention(model, names, layer, into_residual, list);
  list.norm(Part::kMlpNorm, Part::kMlpNormBias, layer + std::string(names.mlp_norm), model.width);
  if (model.experts == 0) {
    add_feed_forward(model, names, layer + "mlp.", into_residual, list);
  } else {
    list.matrix(Part::kRouter, layer + std::string(names.router), model.experts, model.width);
    for (uint32_t expert = 0; expert < model.experts; ++expert) {
      add_feed_forward(model, names, fmt::format("{}{}.{}.", layer, names.expert, expert),
                       into_residual, list);
    }
  }
  if (model.norm_after) {
    list.norm(Part::kMlpPostNorm, {}, layer + std::string(names.mlp_post_norm), model.width);
  }
}

uint64_t elements_of(const Tensor& tensor) {
  uint64_t elements = 1;
  for (const uint64_t extent : tensor.shape) elements *= extent;
  return elements;
}

/// Pairs of elements that turn this often within the trained length, by Peng et al. 2023 (YaRN).
double yarn_pair(const Rope& rope, double rotations, uint32_t head_width) {
  return head_width * std::log(rope.original_positions / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(rope.base));
}

}  // namespace

std::vector<Tensor> tensors_of(const Architecture& model) {
  const Names names = names_of(model.family);
  TensorList list(model);
  if (!model.table_embedding) {
    list.matrix(Part::kEmbedding, std::string(names.embedding), model.vocabulary, model.width);
  }
  if (model.learned_positions) {
    list.matrix(Part::kPositions, "transformer.wpe", model.positions, model.width);
  }
  for (uint32_t layer = 0; layer < model.layers; ++layer) add_layer(model, names, layer, list);
  list.norm(Part::kFinalNorm, Part::kFinalNormBias, std::string(names.final_norm), model.width);
  std::vector<Tensor> tensors = list.take();
  if (!model.tied_head) {
    tensors.push_back(
        {Part::kHead, "lm_head.weight", {model.vocabulary, model.width}, model.init_std, 0});
  }
  return tensors;
}

base::Result<plan::ParameterSpace> make_parameter_space(const Architecture& model) {
  plan::ParameterSpace space;
  for (Tensor& tensor : tensors_of(model)) {
    const uint32_t group = tensor.shape.size() == 1 ? kVectorGroup : kMatrixGroup;
    SI_RETURN_IF_ERROR(space.add(std::move(tensor.name), std::move(tensor.shape), group));
  }
  return space;
}

std::vector<plan::Unit> make_units(const Architecture& model) {
  plan::ModelElements elements;
  elements.layers = model.layers;
  uint64_t of_layers = 0;
  for (const Tensor& tensor : tensors_of(model)) {
    if (tensor.part == Part::kEmbedding || tensor.part == Part::kPositions) {
      elements.embedding += elements_of(tensor);
    } else if (tensor.part == Part::kFinalNorm || tensor.part == Part::kFinalNormBias ||
               tensor.part == Part::kHead) {
      elements.head += elements_of(tensor);
    } else {
      of_layers += elements_of(tensor);
    }
  }
  elements.layer = of_layers / model.layers;
  return plan::make_units(elements);
}

std::vector<float> rope_frequencies(const Rope& rope, uint32_t head_width) {
  const uint32_t pairs = head_width / 2;
  double low = 0;   // yarn: pairs below keep their frequency...
  double high = 1;  // ...and those above are divided by the factor
  if (rope.scaling == Rope::Scaling::kYarn) {
    low = yarn_pair(rope, rope.beta_fast, head_width);
    high = yarn_pair(rope, rope.beta_slow, head_width);
    if (rope.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, head_width - 1.0);
    if (low == high) high += 0.001;  // no division by zero
  }
  const double low_wavelength = rope.original_positions / rope.low_frequency_factor;
  const double high_wavelength = rope.original_positions / rope.high_frequency_factor;
  std::vector<float> frequencies;
  for (uint32_t pair = 0; pair < pairs; ++pair) {
    const float exponent = static_cast<float>(2 * pair) / static_cast<float>(head_width);
    const float plain = 1.0f / std::pow(static_cast<float>(rope.base), exponent);
    const double scaled = plain / rope.factor;
    double frequency = plain;
    if (rope.scaling == Rope::Scaling::kLinear) {
      frequency = scaled;
    } else if (rope.scaling == Rope::Scaling::kLlama3) {
      const double wavelength = 2 * std::numbers::pi / plain;
      const double smooth = (rope.original_positions / wavelength - rope.low_frequency_factor) /
                            (rope.high_frequency_factor - rope.low_frequency_factor);
      if (wavelength > low_wavelength) {
        frequency = scaled;
      } else if (wavelength >= high_wavelength) {
        frequency = (1 - smooth) * scaled + smooth * plain;
      }
    } else if (rope.scaling == Rope::Scaling::kYarn) {
      const double ramp = std::clamp((pair - low) / (high - low), 0.0, 1.0);
      frequency = scaled * ramp + plain * (1 - ramp);
    }
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

double rope_magnitude(const Rope& rope) {
  if (rope.scaling != Rope::Scaling::kYarn) return 1;
  if (rope.attention_factor != 0) return rope.attention_factor;
  const auto magnitude = [&](double scale) {
    return rope.factor <= 1 ? 1.0 : 0.1 * scale * std::log(rope.factor) + 1;
  };
  if (rope.mscale != 0 && rope.mscale_all_dim != 0) {
    return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim);
  }
  return magnitude(1);
}

}  // namespace smartinf::model
