#include "smartinf/train/model.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/train/embedding_table.h"
#include "smartinf/train/linear.h"

namespace smartinf::train {

using model::Part;
using torch::Tensor;

namespace {

/// [M] int64: of each token within its document.
Tensor positions_of(const DocumentEnds& documents, const torch::Device& device) {
  std::vector<Tensor> positions;
  int64_t from = 0;
  for (const int64_t end : documents) {
    positions.push_back(torch::arange(end - from, torch::kInt64));
    from = end;
  }
  return torch::cat(positions).to(device);
}

}  // namespace

const Parameter* find_part(std::span<const Parameter> parameters, Part part) {
  const auto found = std::ranges::find(parameters, part, &Parameter::part);
  return found == parameters.end() ? nullptr : &*found;
}

const Tensor& weight_of_part(std::span<const Parameter> parameters, Part part) {
  const Parameter* found = find_part(parameters, part);
  SI_CHECK(found != nullptr, "a layer has the parts of its architecture");
  return found->weight;
}

Model::Model(const model::Architecture& architecture, const plan::ParameterSpace& space,
             const torch::TensorOptions& weights, uint32_t sequence, bool frozen,
             EmbeddingTable* table)
    : model_(architecture),
      frozen_(frozen),
      table_(table),
      units_(model::make_units(architecture)) {
  SI_CHECK((table != nullptr) == model_.table_embedding, "a model has the table that it says");
  size_t unit = 0;
  shapes_.resize(units_.size());
  for (const model::Tensor& tensor : model::tensors_of(architecture)) {
    const plan::ParameterRange* range = space.find(tensor.name);
    SI_CHECK(range != nullptr, "the space is that of the architecture");
    while (range->first >= units_[unit].end()) ++unit;
    std::vector<Shape>& shapes = shapes_[unit];
    if (!shapes.empty() && shapes.back().part == tensor.part) {
      shapes.back().count += range->count;
      shapes.back().sizes.front() += static_cast<int64_t>(range->shape.front());
    } else {
      shapes.push_back(
          {range->first, range->count, {range->shape.begin(), range->shape.end()}, tensor.part});
    }
  }
  if (model_.learned_positions) return;
  angles_ = make_angles(model_.rope, weights, sequence);
  window_angles_ = make_angles(model_.window_rope, weights, sequence);
}

/// The first half of a head's elements turns against the second, as in Hugging Face's Llama; angles
/// are products in f32, as there.
Model::Angles Model::make_angles(const model::Rope& rope, const torch::TensorOptions& weights,
                                 uint32_t sequence) const {
  std::vector<float> frequencies = model::rope_frequencies(rope, model_.head_width);
  const Tensor angle_TD =
      torch::outer(torch::arange(int64_t{sequence}, torch::kFloat32), torch::tensor(frequencies));
  const double magnitude = model::rope_magnitude(rope);
  const auto table = [&](const Tensor& half_TD) {
    return (torch::cat({half_TD, half_TD}, -1) * magnitude).unsqueeze(1).to(weights);
  };
  return {table(angle_TD.cos()), table(angle_TD.sin())};
}

UnitWeights Model::weights_of(size_t unit, const Tensor& weights_N) const {
  UnitWeights weights;
  for (const Shape& shape : shapes_[unit]) {
    const Tensor flat = weights_N.narrow(0, static_cast<int64_t>(shape.first - units_[unit].first),
                                         static_cast<int64_t>(shape.count));
    weights.push_back(
        {flat.view(shape.sizes).detach().requires_grad_(!frozen_), shape.first, shape.part});
  }
  return weights;
}

Tensor Model::norm(std::span<const Parameter> layer, Part weight, Part bias,
                   const Tensor& x) const {
  const Tensor& factor = weight_of_part(layer, weight);
  switch (model_.norm) {
    case model::Norm::kRms:
      return torch::rms_norm(x, factor.sizes(), factor, model_.norm_eps);
    case model::Norm::kRmsPlusOne:
      return torch::rms_norm(x.to(torch::kFloat32), factor.sizes(), factor.to(torch::kFloat32) + 1,
                             model_.norm_eps)
          .to(x.scalar_type());
    case model::Norm::kLayer:
      return torch::layer_norm(x, factor.sizes(), factor, weight_of_part(layer, bias),
                               model_.norm_eps);
  }
  return x;
}

Tensor Model::product(const Layer& layer, Part weight, Part bias, const Tensor& x) const {
  const Tensor& matrix = weight_of_part(layer.parameters, weight);
  const Parameter* added = find_part(layer.parameters, bias);
  Tensor y = train::linear(x, model_.transposed ? matrix.t() : matrix,
                           added == nullptr ? std::optional<Tensor>() : added->weight);
  for (const Adapter& adapter : layer.adapters) {
    if (adapter.a.part != weight) continue;
    const Tensor more =
        train::linear(train::linear(x, adapter.a.weight), adapter.b.weight) * adapter.scale;
    const int64_t behind = y.size(-1) - adapter.offset - more.size(-1);
    y = y + torch::constant_pad_nd(more, {adapter.offset, behind});
  }
  return y;
}

Tensor Model::activated(const Tensor& x) const {
  switch (model_.activation) {
    case model::Activation::kSilu:
      return torch::silu(x);
    case model::Activation::kGelu:
      return torch::gelu(x);
    case model::Activation::kGeluTanh:
      return torch::gelu(x, "tanh");
  }
  return x;
}

Model::Rows Model::rows_of(const Tensor& x_BTC, const DocumentEnds& documents,
                           KeyValueCache* cache) const {
  SI_CHECK(cache == nullptr || (documents.empty() && x_BTC.size(0) == 1),
           "a cache is of one sequence, which is one document");
  Rows rows{documents, cache, {}, {}};
  if (model_.learned_positions) return rows;
  const int64_t tokens = x_BTC.size(1);
  const int64_t before = cache == nullptr ? 0 : cache->tokens();
  Tensor positions_M;
  if (!documents.empty()) positions_M = positions_of(documents, x_BTC.device());
  const auto of_rows = [&](const Tensor& table_T1D) {
    if (documents.empty()) return table_T1D.narrow(0, before, tokens);
    return table_T1D.index_select(0, positions_M).view({x_BTC.size(0), tokens, 1, -1});
  };
  rows.angles = {of_rows(angles_.cosine_T1D), of_rows(angles_.sine_T1D)};
  rows.window_angles = {of_rows(window_angles_.cosine_T1D), of_rows(window_angles_.sine_T1D)};
  return rows;
}

Tensor Model::rotated(const Angles& angles, const Tensor& x_BTHD) {
  const auto halves = x_BTHD.chunk(2, -1);
  const Tensor turned_BTHD = torch::cat({-halves[1], halves[0]}, -1);
  return x_BTHD * angles.cosine_T1D + turned_BTHD * angles.sine_T1D;
}

/// One document in each row, of which the last T tokens ask.
Tensor Model::attend(const Tensor& query_BHTD, const Tensor& key_BKSD, const Tensor& value_BKSD,
                     uint32_t window) const {
  const int64_t tokens = query_BHTD.size(2);
  const int64_t seen = key_BKSD.size(2);
  const bool grouped = model_.kv_heads != model_.heads;
  const bool slides = window != 0 && seen > int64_t{window};
  const bool begins = tokens == seen;
  std::optional<double> scale;
  if (model_.attention_scale != 0) scale = model_.attention_scale;
  if (!slides && model_.attention_softcap == 0 && (begins || tokens == 1)) {
    return torch::scaled_dot_product_attention(query_BHTD, key_BKSD, value_BKSD,
                                               /*attn_mask=*/{}, /*dropout_p=*/0,
                                               /*is_causal=*/begins, scale, grouped);
  }
  Tensor seen_TS =
      torch::ones({tokens, seen}, query_BHTD.options().dtype(torch::kBool)).tril(seen - tokens);
  if (slides) seen_TS = seen_TS.triu(1 + seen - tokens - int64_t{window});
  if (model_.attention_softcap == 0) {
    return torch::scaled_dot_product_attention(query_BHTD, key_BKSD, value_BKSD, seen_TS,
                                               /*dropout_p=*/0, /*is_causal=*/false, scale,
                                               grouped);
  }
  const int64_t sharing = model_.heads / model_.kv_heads;
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(model_.head_width)));
  const Tensor key_BHSD = key_BKSD.repeat_interleave(sharing, 1);
  const Tensor value_BHSD = value_BKSD.repeat_interleave(sharing, 1);
  Tensor scores_BHTS = torch::matmul(query_BHTD, key_BHSD.transpose(2, 3)) * factor;
  scores_BHTS = torch::tanh(scores_BHTS / model_.attention_softcap) * model_.attention_softcap;
  scores_BHTS = scores_BHTS.masked_fill(seen_TS.logical_not(), -INFINITY);
  const Tensor shares_BHTS =
      torch::softmax(scores_BHTS, -1, torch::kFloat32).to(query_BHTD.scalar_type());
  return torch::matmul(shares_BHTS, value_BHSD);
}

Tensor Model::attention(const Layer& layer, uint32_t index, const Tensor& h_BTC,
                        const Rows& rows) const {
  const uint32_t window = model_.windows[index];
  const int64_t heads = model_.heads;
  const int64_t kv_heads = model_.kv_heads;
  const auto qkv = product(layer, Part::kQkv, Part::kQkvBias, h_BTC)
                       .unflatten(-1, {heads + 2 * kv_heads, int64_t{model_.head_width}})
                       .split_with_sizes({heads, kv_heads, kv_heads}, 2);
  Tensor query_BTHD = qkv[0];
  Tensor key_BTKD = qkv[1];
  if (model_.query_key_norm) {
    query_BTHD = norm(layer.parameters, Part::kQueryNorm, {}, query_BTHD);
    key_BTKD = norm(layer.parameters, Part::kKeyNorm, {}, key_BTKD);
  }
  if (!model_.learned_positions) {
    const Angles& angles = window != 0 ? rows.window_angles : rows.angles;
    query_BTHD = rotated(angles, query_BTHD);
    key_BTKD = rotated(angles, key_BTKD);
  }
  const Tensor query_BHTD = query_BTHD.transpose(1, 2);
  Tensor key_BKSD = key_BTKD.transpose(1, 2);
  Tensor value_BKSD = qkv[2].transpose(1, 2);
  if (rows.cache != nullptr) rows.cache->extend(index, key_BKSD, value_BKSD);
  Tensor attended_BHTD;
  if (rows.documents.empty()) {
    attended_BHTD = attend(query_BHTD, key_BKSD, value_BKSD, window);
  } else {
    const int64_t tokens = h_BTC.size(1);
    std::vector<Tensor> attended;  // rows
    std::vector<Tensor> row;
    int64_t from = 0;
    for (const int64_t end : rows.documents) {
      const auto part = [&](const Tensor& all) {
        return all.narrow(0, from / tokens, 1).narrow(2, from % tokens, end - from);
      };
      row.push_back(attend(part(query_BHTD), part(key_BKSD), part(value_BKSD), window));
      if (end % tokens == 0) attended.push_back(torch::cat(std::exchange(row, {}), 2));
      from = end;
    }
    attended_BHTD = torch::cat(attended, 0);
  }
  return product(layer, Part::kOutput, Part::kOutputBias, attended_BHTD.transpose(1, 2).flatten(2));
}

/// layer: all of it, or one expert.
Tensor Model::feed_forward(const Layer& layer, const Tensor& h_BTC) const {
  const Tensor up = product(layer, Part::kGateUp, Part::kGateUpBias, h_BTC);
  if (!model_.gated) return product(layer, Part::kDown, Part::kDownBias, activated(up));
  const auto gate_up = up.chunk(2, -1);
  return product(layer, Part::kDown, Part::kDownBias, activated(gate_up[0]) * gate_up[1]);
}

/// Each token through the experts that the router gives the most for it.
Tensor Model::run_experts(const Layer& layer, const Tensor& h_BTC) const {
  const Tensor h_MC = h_BTC.flatten(0, 1);
  const Tensor chances_MX = torch::softmax(
      train::linear(h_MC, weight_of_part(layer.parameters, Part::kRouter)), -1, torch::kFloat32);
  auto [share_MK, expert_MK] = chances_MX.topk(model_.experts_per_token, -1);
  if (model_.normalized_experts) share_MK = share_MK / share_MK.sum(-1, /*keepdim=*/true);
  share_MK = share_MK.to(h_MC.scalar_type());

  Tensor y_MC = torch::zeros_like(h_MC);
  auto parameters = std::find_if(layer.parameters.begin(), layer.parameters.end(),
                                 [](const Parameter& one) { return one.part == Part::kGateUp; });
  for (int64_t expert = 0; expert < int64_t{model_.experts}; ++expert, parameters += 2) {
    const auto chosen = torch::where(expert_MK == expert);
    const Tensor& token = chosen[0];
    if (token.numel() == 0) continue;
    const Tensor made = feed_forward(Layer{{parameters, 2}, {}}, h_MC.index_select(0, token)) *
                        share_MK.index({token, chosen[1]}).unsqueeze(-1);
    y_MC = y_MC.index_add(0, token, made);
  }
  return y_MC.view_as(h_BTC);
}

Tensor Model::run_layer(const Layer& layer, uint32_t index, const Tensor& x_BTC,
                        const Rows& rows) const {
  Tensor h_BTC = norm(layer.parameters, Part::kAttentionNorm, Part::kAttentionNormBias, x_BTC);
  Tensor made_BTC = attention(layer, index, h_BTC, rows);
  if (model_.norm_after) made_BTC = norm(layer.parameters, Part::kAttentionPostNorm, {}, made_BTC);
  const Tensor y_BTC = x_BTC + made_BTC;
  h_BTC = norm(layer.parameters, Part::kMlpNorm, Part::kMlpNormBias, y_BTC);
  made_BTC = model_.experts != 0 ? run_experts(layer, h_BTC) : feed_forward(layer, h_BTC);
  if (model_.norm_after) made_BTC = norm(layer.parameters, Part::kMlpPostNorm, {}, made_BTC);
  return y_BTC + made_BTC;
}

Tensor Model::embed(const UnitWeights& embedding, const Tensor& tokens_BT,
                    const DocumentEnds& documents, const KeyValueCache* cache,
                    const Tensor& rows_BTC) const {
  Tensor x_BTC = rows_BTC;
  if (table_ == nullptr) {
    x_BTC = torch::embedding(embedding.front().weight, tokens_BT, model_.padding_token);
  } else if (!x_BTC.defined()) {
    x_BTC = table_->rows(tokens_BT, /*keep=*/false);
  }
  if (model_.scaled_embedding) {
    // In the weights' type, as in transformers: sqrt(3072) is 55.5 in bf16.
    x_BTC = x_BTC * torch::full({}, std::sqrt(static_cast<double>(model_.width)), x_BTC.options());
  }
  if (!model_.learned_positions) return x_BTC;
  const Tensor& positions_PC = weight_of_part(embedding, Part::kPositions);
  if (documents.empty()) {
    const int64_t before = cache == nullptr ? 0 : cache->tokens();
    return x_BTC + positions_PC.narrow(0, before, tokens_BT.size(1));
  }
  const Tensor position_M = positions_of(documents, tokens_BT.device());
  return x_BTC + torch::embedding(positions_PC, position_M.view_as(tokens_BT));
}

Tensor Model::run_layers(size_t unit, const UnitWeights& layers,
                         std::span<const LayerAdapters> adapters, Tensor x_BTC,
                         const DocumentEnds& documents, KeyValueCache* cache) const {
  const size_t of_layer = layers.size() / units_[unit].layers;
  const Rows rows = rows_of(x_BTC, documents, cache);
  for (uint32_t i = 0; i < units_[unit].layers; ++i) {
    Layer layer{std::span(layers).subspan(i * of_layer, of_layer), {}};
    if (!adapters.empty()) layer.adapters = adapters[i];
    x_BTC = run_layer(layer, units_[unit].first_layer + i, x_BTC, rows);
  }
  return x_BTC;
}

Tensor Model::final_norm(const UnitWeights& head, const Tensor& x_BTC) const {
  return norm(head, Part::kFinalNorm, Part::kFinalNormBias, x_BTC).flatten(0, 1);
}

Tensor Model::logits(const Tensor& h_MC, const Tensor& matrix_VC) const {
  const Tensor logits_MV = train::linear(h_MC, matrix_VC);
  if (model_.logit_softcap == 0) return logits_MV;
  return torch::tanh(logits_MV / model_.logit_softcap) * model_.logit_softcap;
}

}  // namespace smartinf::train
