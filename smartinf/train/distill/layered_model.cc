#include "smartinf/train/distill/layered_model.h"

#include <algorithm>
#include <utility>

#include "smartinf/plan/training_memory.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/status_error.h"
#include "smartinf/train/windows.h"

namespace smartinf::train {

using base::Result;
using torch::Tensor;

Result<LayeredModel> LayeredModel::open(const std::string& folder,
                                        const model::Architecture& architecture,
                                        base::DataType type, torch::Device device,
                                        uint32_t sequence) {
  SI_ASSIGN_OR_RETURN(model::WeightFiles files, model::WeightFiles::open(folder, architecture));
  SI_ASSIGN_OR_RETURN(plan::ParameterSpace space, model::make_parameter_space(architecture));
  return LayeredModel(std::move(files), architecture, std::move(space), type, device, sequence);
}

LayeredModel::LayeredModel(model::WeightFiles files, const model::Architecture& architecture,
                           plan::ParameterSpace space, base::DataType type, torch::Device device,
                           uint32_t sequence)
    : files_(std::move(files)),
      architecture_(architecture),
      space_(std::move(space)),
      type_(type),
      device_(device),
      sequence_(sequence) {
  const std::vector<plan::Unit> units = model::make_units(architecture_);
  embedding_ = units.front();
  head_ = units.back();
  layer_elements_ = (head_.first - embedding_.end()) / architecture_.layers;
}

plan::Unit LayeredModel::layer_span(uint32_t layer) const {
  return {embedding_.end() + layer * layer_elements_, layer_elements_, layer, 1};
}

Model LayeredModel::of_one_layer(uint32_t layer, bool frozen) const {
  model::Architecture one = architecture_;
  one.layers = 1;
  one.windows = {architecture_.windows[layer]};
  const base::Result<plan::ParameterSpace> space = model::make_parameter_space(one);
  throw_if_error(space.status());
  return Model(one, *space, torch::dtype(scalar_type(type_)).device(device_), sequence_, frozen);
}

Tensor LayeredModel::read(const plan::Unit& span) const {
  const Tensor weights_N =
      torch::empty({static_cast<int64_t>(span.count)}, torch::dtype(scalar_type(type_)));
  throw_if_error(
      files_.read_as(type_, span.first, span.count, static_cast<std::byte*>(weights_N.data_ptr())));
  return weights_N.to(device_);
}

ModelPart LayeredModel::layer(uint32_t layer, const Tensor& weights_N) const {
  Model model = of_one_layer(layer, /*frozen=*/false);
  UnitWeights weights = model.weights_of(1, weights_N);
  return {std::move(model), std::move(weights)};
}

std::vector<Tensor> LayeredModel::embed(std::span<const Batch> batches) const {
  const torch::NoGradGuard no_grad;
  const Model model = of_one_layer(0, /*frozen=*/true);
  const UnitWeights weights = model.weights_of(0, read(embedding_));
  std::vector<Tensor> all_BTC;
  for (const Batch& batch : batches) {
    all_BTC.push_back(model.embed(weights, batch.tokens_BT, batch.document_ends));
  }
  return all_BTC;
}

LayeredModel::Head LayeredModel::head() const {
  Model model = of_one_layer(0, /*frozen=*/true);
  UnitWeights weights = model.weights_of(2, read(head_));
  UnitWeights embedding = weights;
  if (architecture_.tied_head) embedding = model.weights_of(0, read(embedding_));
  Tensor matrix_VC = model.head_matrix(weights, embedding);
  return {{std::move(model), std::move(weights)}, std::move(matrix_VC)};
}

double LayeredModel::loss(std::span<const Batch> batches) const {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> all_BTC = embed(batches);
  for (uint32_t index = 0; index < layers(); ++index) {
    const ModelPart part = layer(index);
    for (size_t i = 0; i < batches.size(); ++i) {
      all_BTC[i] = part.run(all_BTC[i], batches[i].document_ends);
    }
  }
  const Head head = this->head();
  const auto rows = static_cast<int64_t>(plan::head_rows(architecture_.vocabulary));
  double sum = 0;
  uint64_t targets = 0;
  for (size_t i = 0; i < batches.size(); ++i) {
    const Tensor h_MC = head.normed(all_BTC[i]);
    const Tensor targets_M = batches[i].targets_BT.flatten();
    for (int64_t from = 0; from < h_MC.size(0); from += rows) {
      const int64_t some = std::min(rows, h_MC.size(0) - from);
      sum += torch::cross_entropy_loss(head.logits(h_MC.narrow(0, from, some)).to(torch::kFloat32),
                                       targets_M.narrow(0, from, some), /*weight=*/{},
                                       at::Reduction::Sum, kNoTarget)
                 .item<double>();
    }
    targets += batches[i].targets;
  }
  return sum / static_cast<double>(std::max<uint64_t>(targets, 1));
}

}  // namespace smartinf::train
