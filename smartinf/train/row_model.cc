#include "smartinf/train/row_model.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/kernels/row_ops.h"
#include "smartinf/kernels/update.h"
#include "smartinf/train/embedding_table.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using kernels::RowMatrix;
using model::Part;
using torch::Tensor;

namespace {

/// An expert's share of a token.
struct Share {
  size_t expert = 0;
  float share = 0;
};

/// The experts with the largest logits, in their order; shares as a softmax of all gives them.
std::vector<Share> choose_experts(const model::Architecture& model, std::span<const float> logits) {
  const float most = std::ranges::max(logits);
  float sum = 0;
  std::vector<Share> all;
  for (size_t i = 0; i < logits.size(); ++i) {
    all.push_back({i, std::exp(logits[i] - most)});
    sum += all.back().share;
  }
  for (Share& one : all) one.share /= sum;
  std::ranges::stable_sort(all, std::greater(), &Share::share);
  all.resize(model.experts_per_token);
  if (model.normalized_experts) {
    sum = 0;
    for (const Share& one : all) sum += one.share;
    for (Share& one : all) one.share /= sum;
  }
  std::ranges::sort(all, {}, &Share::expert);
  return all;
}

}  // namespace

RowModel::RowModel(const Model& model, base::DataType type, base::ThreadTeam& team)
    : model_(model), shape_(model.architecture()), type_(type), team_(team), product_(team) {}

/// Calls body once for each row, on several threads where that is worth it.
void RowModel::each_row(size_t rows, size_t width, const std::function<void(size_t)>& body) {
  constexpr size_t kWorthAThread = 8192;
  if (rows * width < kWorthAThread) {
    for (size_t r = 0; r < rows; ++r) body(r);
  } else {
    team_.run(rows, [&](uint32_t /*worker*/, size_t r) { body(r); });
  }
}

std::vector<float> RowModel::values_of(const Tensor& weights) const {
  std::vector<float> values(static_cast<size_t>(weights.numel()));
  kernels::kernels().cast_to_f32(weights.const_data_ptr(), type_, values.data(), values.size());
  return values;
}

RowMatrix RowModel::matrix_of(const Tensor& weights, bool transposed) const {
  const auto rows = static_cast<size_t>(weights.size(0));
  const auto columns = static_cast<size_t>(weights.size(1));
  return {.weights = weights.const_data_ptr(),
          .type = type_,
          .outputs = transposed ? columns : rows,
          .inputs = transposed ? rows : columns,
          .transposed = transposed};
}

void RowModel::norm(std::span<const Parameter> parameters, Part weight, Part bias, ConstRows in,
                    Rows out) {
  std::vector<float> factor = values_of(weight_of_part(parameters, weight));
  if (shape_.norm == model::Norm::kRmsPlusOne) {
    for (float& one : factor) one += 1;
  }
  std::vector<float> added;
  if (shape_.norm == model::Norm::kLayer) added = values_of(weight_of_part(parameters, bias));
  const auto eps = static_cast<float>(shape_.norm_eps);
  const size_t width = factor.size();
  each_row(in.size() / width, width, [&](size_t r) {
    const ConstRows from = in.subspan(r * width, width);
    const Rows to = out.subspan(r * width, width);
    if (added.empty()) {
      kernels::rms_norm(type_, factor, eps, from, to);
    } else {
      kernels::layer_norm(type_, factor, added, eps, from, to);
    }
  });
}

std::vector<float> RowModel::product(const Layer& layer, Part weight, Part bias, ConstRows in) {
  RowMatrix matrix = matrix_of(weight_of_part(layer.parameters, weight), shape_.transposed);
  if (const Parameter* added = find_part(layer.parameters, bias)) {
    matrix.bias = added->weight.const_data_ptr();
  }
  const size_t rows = in.size() / matrix.inputs;
  std::vector<float> y(rows * matrix.outputs);
  product_.run(matrix, in, y);
  for (const Adapter& adapter : layer.adapters) {
    if (adapter.a.part == weight) add_adapter(adapter, in, rows, y);
  }
  return y;
}

void RowModel::add_adapter(const Adapter& adapter, ConstRows in, size_t rows, Rows y) {
  const RowMatrix a = matrix_of(adapter.a.weight, false);
  const RowMatrix b = matrix_of(adapter.b.weight, false);
  std::vector<float> inner(rows * a.outputs);
  std::vector<float> more(rows * b.outputs);
  product_.run(a, in, inner);
  product_.run(b, inner, more);
  kernels::multiply(type_, static_cast<float>(adapter.scale), more);
  const size_t width = y.size() / rows;
  for (size_t r = 0; r < rows; ++r) {
    kernels::add(type_, ConstRows(more).subspan(r * b.outputs, b.outputs),
                 y.subspan(r * width + static_cast<size_t>(adapter.offset), b.outputs));
  }
}

ModelRows::Angles RowModel::angles_at(std::span<const int64_t> positions, const Tensor& cosine_T1D,
                                      const Tensor& sine_T1D) const {
  const auto rows_of = [&](const Tensor& table_T1D) {
    std::vector<float> rows;
    for (const int64_t position : positions) {
      const std::vector<float> row = values_of(table_T1D.select(0, position));
      rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
  };
  return {rows_of(cosine_T1D), rows_of(sine_T1D)};
}

void RowModel::embed(const UnitWeights& embedding, ModelRows& rows) {
  const size_t width = shape_.width;
  rows.x_MC.resize(rows.count() * width);
  // In the weights' type, as torch has it.
  float scale[1] = {static_cast<float>(std::sqrt(static_cast<double>(shape_.width)))};
  kernels::round_to(type_, scale);
  const auto row_of = [&](const Tensor& rows_MC, int64_t row) {
    return values_of(rows_MC.select(0, row));
  };
  Tensor table_MC;
  if (EmbeddingTable* table = model_.table()) {
    table_MC = table->rows(torch::tensor(rows.tokens, torch::kInt64), /*keep=*/false);
  }
  for (size_t r = 0; r < rows.count(); ++r) {
    const Rows x_C = Rows(rows.x_MC).subspan(r * width, width);
    std::ranges::copy(table_MC.defined() ? row_of(table_MC, static_cast<int64_t>(r))
                                         : row_of(embedding.front().weight, rows.tokens[r]),
                      x_C.begin());
    if (shape_.scaled_embedding) kernels::multiply(type_, scale[0], x_C);
    if (shape_.learned_positions) {
      const Tensor& positions_PC = weight_of_part(embedding, Part::kPositions);
      kernels::add(type_, values_of(positions_PC.select(0, rows.positions[r])), x_C);
    }
  }
  if (shape_.learned_positions) return;
  const std::vector<Tensor> tables = model_.tables();
  rows.angles = angles_at(rows.positions, tables[0], tables[1]);
  rows.window_angles = angles_at(rows.positions, tables[2], tables[3]);
}

void RowModel::begin_layer(const Layer& layer, ModelRows& rows, engine::KeyValueStore& store) {
  const size_t count = rows.count();
  const size_t head_width = shape_.head_width;
  const size_t queries = shape_.query_width();
  const size_t keys = shape_.kv_width();
  std::vector<float> h_MC(rows.x_MC.size());
  norm(layer.parameters, Part::kAttentionNorm, Part::kAttentionNormBias, rows.x_MC, h_MC);
  const std::vector<float> qkv_ME = product(layer, Part::kQkv, Part::kQkvBias, h_MC);
  rows.query_MHD.resize(count * queries);
  rows.attended_MHD.resize(count * queries);
  std::vector<float> key_MKD(count * keys);
  for (size_t r = 0; r < count; ++r) {
    const auto row = qkv_ME.begin() + static_cast<std::ptrdiff_t>(r * (queries + 2 * keys));
    std::copy_n(row, queries, rows.query_MHD.begin() + static_cast<std::ptrdiff_t>(r * queries));
    std::copy_n(row + static_cast<std::ptrdiff_t>(queries), keys,
                key_MKD.begin() + static_cast<std::ptrdiff_t>(r * keys));
  }
  if (shape_.query_key_norm) {
    norm(layer.parameters, Part::kQueryNorm, {}, rows.query_MHD, rows.query_MHD);
    norm(layer.parameters, Part::kKeyNorm, {}, key_MKD, key_MKD);
  }
  if (!shape_.learned_positions) {
    const bool window = shape_.windows[layer.index] != 0;
    const ModelRows::Angles& angles = window ? rows.window_angles : rows.angles;
    each_row(count, queries + keys, [&](size_t r) {
      const ConstRows cosine = ConstRows(angles.cosine_MD).subspan(r * head_width, head_width);
      const ConstRows sine = ConstRows(angles.sine_MD).subspan(r * head_width, head_width);
      kernels::rotate(type_, cosine, sine, Rows(rows.query_MHD).subspan(r * queries, queries));
      kernels::rotate(type_, cosine, sine, Rows(key_MKD).subspan(r * keys, keys));
    });
  }
  rows.queries.clear();
  for (size_t r = 0; r < count; ++r) {
    const float* value_KD = qkv_ME.data() + r * (queries + 2 * keys) + queries + keys;
    base::Status appended = store.append(rows.ids[r], layer.index, 1, base::DataType::kF32,
                                         key_MKD.data() + r * keys, value_KD);
    if (store.failure(rows.ids[r]).ok()) throw_if_error(std::move(appended));
    rows.queries.push_back(
        {rows.ids[r], rows.query_MHD.data() + r * queries, rows.attended_MHD.data() + r * queries});
  }
  auto begun = store.begin_attend(layer.index, rows.queries);
  throw_if_error(begun.status());
  rows.ticket = *begun;
}

void RowModel::activate(Rows row) const {
  switch (shape_.activation) {
    case model::Activation::kSilu:
      return kernels::silu(type_, row);
    case model::Activation::kGelu:
      return kernels::gelu(type_, row);
    case model::Activation::kGeluTanh:
      return kernels::gelu_tanh(type_, row);
  }
}

/// layer: all of it, or one expert.
std::vector<float> RowModel::feed_forward(const Layer& layer, ConstRows h_MC) {
  const size_t rows = h_MC.size() / shape_.width;
  std::vector<float> up_MG = product(layer, Part::kGateUp, Part::kGateUpBias, h_MC);
  const size_t all = up_MG.size() / rows;
  const size_t width = shape_.gated ? all / 2 : all;
  std::vector<float> hidden_MF(rows * width);
  each_row(rows, all, [&](size_t r) {
    const ConstRows up_G = ConstRows(up_MG).subspan(r * all, all);
    const Rows hidden_F = Rows(hidden_MF).subspan(r * width, width);
    std::ranges::copy(up_G.first(width), hidden_F.begin());
    activate(hidden_F);
    if (shape_.gated) kernels::multiply(type_, up_G.subspan(width), hidden_F);
  });
  return product(layer, Part::kDown, Part::kDownBias, hidden_MF);
}

/// Each row through the experts that the router gives the most for it.
std::vector<float> RowModel::run_experts(const Layer& layer, ConstRows h_MC) {
  const size_t width = shape_.width;
  const size_t rows = h_MC.size() / width;
  std::vector<float> logits_MX(rows * shape_.experts);
  product_.run(matrix_of(weight_of_part(layer.parameters, Part::kRouter), false), h_MC, logits_MX);
  std::vector<std::vector<std::pair<size_t, float>>> by_expert(shape_.experts);  // row, share
  for (size_t r = 0; r < rows; ++r) {
    const ConstRows logits_X = ConstRows(logits_MX).subspan(r * shape_.experts, shape_.experts);
    for (Share& one : choose_experts(shape_, logits_X)) {
      kernels::round_to(type_, {&one.share, 1});
      by_expert[one.expert].emplace_back(r, one.share);
    }
  }
  std::vector<float> y_MC(h_MC.size());
  const Parameter* parameters = find_part(layer.parameters, Part::kGateUp);
  for (const auto& chosen : by_expert) {
    std::vector<float> of_expert;
    for (const auto& [row, share] : chosen) {
      const ConstRows h_C = h_MC.subspan(row * width, width);
      of_expert.insert(of_expert.end(), h_C.begin(), h_C.end());
    }
    const Layer expert{{parameters, 2}, {}, layer.index};
    parameters += 2;
    if (chosen.empty()) continue;
    std::vector<float> made = feed_forward(expert, of_expert);
    for (size_t i = 0; i < chosen.size(); ++i) {
      const Rows made_C = Rows(made).subspan(i * width, width);
      kernels::multiply(type_, chosen[i].second, made_C);
      kernels::add(type_, made_C, Rows(y_MC).subspan(chosen[i].first * width, width));
    }
  }
  return y_MC;
}

/// Adds what attention or the feed-forward part has made to the residual stream.
void RowModel::add_made(const Layer& layer, Part post_norm, std::vector<float> made_MC, Rows x_MC) {
  if (shape_.norm_after) norm(layer.parameters, post_norm, {}, made_MC, made_MC);
  kernels::add(type_, made_MC, x_MC);
}

void RowModel::end_layer(const Layer& layer, ModelRows& rows, engine::KeyValueStore& store) {
  base::Status attended = store.finish_attend(*std::exchange(rows.ticket, std::nullopt));
  const auto failed = [&](engine::SequenceId id) { return !store.failure(id).ok(); };
  if (!attended.ok() && std::ranges::none_of(rows.ids, failed)) {
    throw_if_error(std::move(attended));
  }
  kernels::round_to(type_, rows.attended_MHD);
  add_made(layer, Part::kAttentionPostNorm,
           product(layer, Part::kOutput, Part::kOutputBias, rows.attended_MHD), rows.x_MC);
  std::vector<float> h_MC(rows.x_MC.size());
  norm(layer.parameters, Part::kMlpNorm, Part::kMlpNormBias, rows.x_MC, h_MC);
  add_made(layer, Part::kMlpPostNorm,
           shape_.experts != 0 ? run_experts(layer, h_MC) : feed_forward(layer, h_MC), rows.x_MC);
}

std::span<const float> RowModel::logits(const UnitWeights& head, const Tensor& matrix_VC,
                                        const ModelRows& rows, size_t first, size_t count) {
  const ConstRows x_MC = ConstRows(rows.x_MC).subspan(first * shape_.width, count * shape_.width);
  std::vector<float> h_MC(x_MC.size());
  norm(head, Part::kFinalNorm, Part::kFinalNormBias, x_MC, h_MC);
  logits_MV_.resize(count * shape_.vocabulary);
  product_.run(matrix_of(matrix_VC, false), h_MC, logits_MV_);
  if (shape_.logit_softcap != 0) {
    each_row(count, shape_.vocabulary, [&](size_t r) {
      kernels::soft_cap(type_, static_cast<float>(shape_.logit_softcap),
                        Rows(logits_MV_).subspan(r * shape_.vocabulary, shape_.vocabulary));
    });
  }
  return logits_MV_;
}

}  // namespace smartinf::train
