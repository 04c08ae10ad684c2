#include "smartinf/train/unit_pass.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "smartinf/base/clock.h"
#include "smartinf/plan/training_memory.h"
#include "smartinf/train/embedding_table.h"
#include "smartinf/train/offload_choice.h"
#include "smartinf/train/status_error.h"
#include "smartinf/train/windows.h"

namespace smartinf::train {

using torch::Tensor;

namespace {

Tensor leaf(const Tensor& tensor) { return tensor.detach().requires_grad_(true); }

/// The unit's weights as one tensor.
Tensor all_of(const UnitWeights& weights) {
  int64_t elements = 0;
  for (const Parameter& parameter : weights) elements += parameter.weight.numel();
  const Tensor& first = weights.front().weight;
  return torch::from_blob(first.data_ptr(), {elements}, first.options());
}

std::vector<Tensor> tensors_of(std::span<const Parameter> weights) {
  std::vector<Tensor> tensors;
  for (const Parameter& parameter : weights) tensors.push_back(parameter.weight);
  return tensors;
}

struct HeadGradients {
  Tensor h_MC;
  Tensor matrix_VC;  // f32 when it is a sum
};

/// The sum over the batch's targets, divided by `targets`; gradients of it where they are wanted.
/// Logits are made for some rows at a time and leave nothing behind but that. Rows whose target
/// does not count have none. The loss is cross entropy, or the divergence from a teacher's logits.
double head_loss(const Model& model, const Tensor& h_MC, const Tensor& matrix_VC,
                 const Batch& batch, double targets, HeadGradients* gradients) {
  const auto counted = static_cast<int64_t>(batch.targets);
  const bool all = counted == h_MC.size(0);
  Tensor targets_R = batch.targets_BT.flatten();
  Tensor index_R;
  if (!all) {
    index_R = targets_R.ne(kNoTarget).nonzero().flatten();
    targets_R = targets_R.index_select(0, index_R);
    if (gradients != nullptr) gradients->h_MC = torch::zeros_like(h_MC);
  }
  const auto rows_at_once =
      static_cast<int64_t>(plan::head_rows(static_cast<uint64_t>(matrix_VC.size(0))));
  const Tensor share =
      torch::full({}, static_cast<float>(1.0 / targets), h_MC.options().dtype(torch::kFloat32));
  Tensor loss;
  std::vector<Tensor> h_gradients;
  for (int64_t from = 0; from < counted; from += rows_at_once) {
    const int64_t some = std::min(rows_at_once, counted - from);
    const Tensor rows_R = all ? Tensor() : index_R.narrow(0, from, some);
    Tensor part_RC = all ? h_MC.narrow(0, from, some) : h_MC.index_select(0, rows_R);
    if (gradients != nullptr) part_RC = leaf(part_RC);
    Tensor output = model.logits(part_RC, matrix_VC);
    Tensor gradient = share;
    Tensor part;
    if (batch.teacher) {
      const TopLogits& all_rows = *batch.teacher;
      Divergence made =
          divergence(output, all ? all_rows.rows(from, some)
                                 : TopLogits{all_rows.token_MK.index_select(0, rows_R),
                                             all_rows.chances_ML.index_select(0, rows_R)});
      part = std::move(made.loss);
      gradient = made.gradient_RV.mul_(share).to(output.scalar_type());
    } else {
      output = part =
          torch::cross_entropy_loss(output.to(torch::kFloat32), targets_R.narrow(0, from, some),
                                    /*weight=*/{}, at::Reduction::Sum);
    }
    loss = from == 0 ? part.detach() : loss + part.detach();
    if (gradients == nullptr) continue;
    std::vector<Tensor> leaves{part_RC};
    if (matrix_VC.requires_grad()) leaves.push_back(matrix_VC);
    auto made = torch::autograd::grad({output}, leaves, {gradient});
    if (all) {
      h_gradients.push_back(std::move(made[0]));
    } else {
      gradients->h_MC.index_copy_(0, rows_R, made[0]);
    }
    if (made.size() == 1) continue;  // the head is not trained
    Tensor& sum_VC = gradients->matrix_VC;
    sum_VC = from == 0 ? std::move(made[1]) : sum_VC.to(torch::kFloat32).add_(made[1]);
  }
  if (gradients != nullptr && all) {
    gradients->h_MC = h_gradients.size() == 1 ? h_gradients.front() : torch::cat(h_gradients);
  }
  if (counted > 0) return (loss / targets).item<double>();
  if (matrix_VC.requires_grad() && gradients != nullptr) {
    gradients->matrix_VC = torch::zeros_like(matrix_VC);
  }
  return 0;
}

}  // namespace

UnitPass::UnitPass(const Model& model, LayerStream& stream, Adapters* adapters, bool recompute,
                   UnitInputs inputs, std::optional<SpooledBuffers> saved,
                   std::optional<Stage> stage)
    : model_(model),
      stream_(stream),
      adapters_(adapters),
      recompute_(recompute),
      stage_(std::move(stage)),
      inputs_(std::move(inputs)),
      saved_(std::move(saved)) {
  sums_.resize(model.units().size());
}

/// Forward, then the head with a tied embedding behind it, then back.
std::vector<uint32_t> UnitPass::order() const {
  std::vector<uint32_t> order = forward_order();
  const uint32_t last = adapters_ == nullptr ? 0 : 1;
  for (auto unit = static_cast<uint32_t>(model_.head()); unit-- > last;) order.push_back(unit);
  return order;
}

std::vector<uint32_t> UnitPass::forward_order() const {
  std::vector<uint32_t> order(model_.units().size());
  std::iota(order.begin(), order.end(), 0u);
  if (model_.tied_head()) order.push_back(0);
  return order;
}

std::vector<double> UnitPass::train(std::span<const Batch> batches, const Options& options) {
  const size_t head_unit = model_.head();
  batches_ = batches;
  options_ = &options;
  offloaded_ = 0;
  if (options.first == options.mine.begin) {  // the step before may have been stopped
    for (auto& sums : sums_) sums.clear();
    tied_sums_.reset();
    if (model_.table() != nullptr) model_.table()->forget();
  }
  inputs_.begin(head_unit + 1, batches.size());
  if (saved_) saved_->begin(head_unit, batches.size());
  graphs_.clear();
  for (size_t unit = 0; unit < head_unit; ++unit) graphs_.emplace_back(batches.size());
  gradients_BTC_.assign(batches.size(), Tensor());

  if (adapters_ != nullptr) throw_if_error(adapters_->wait_all());
  if (stage_) return train_stage();
  stream_.start(order());
  for (size_t unit = 0; unit < head_unit; ++unit) {
    if (options.before_unit) options.before_unit();
    const UnitWeights& weights = stream_.get(unit);
    for (size_t i = 0; i < batches.size(); ++i) {
      // Turned round at every unit: what the unit before made last is still near.
      forward_unit(unit, weights, unit % 2 == 0 ? i : batches.size() - 1 - i);
    }
    stream_.release(unit);
  }
  if (const torch::Device device = batches[0].tokens_BT.device();
      options.times_forward && !device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
  backward_began_ns_ = base::now_ns();
  backward_began_waited_s_ = waited_s();
  const Head head = get_head();
  std::vector<double> losses;
  for (size_t i = 0; i < batches.size(); ++i) losses.push_back(head_of(head, i));
  const std::vector<Parameter> of_head = trained(head_unit, head.weights);
  release_head();
  emit_gradients(head_unit, of_head);
  const size_t last = adapters_ == nullptr ? 0 : 1;  // behind it nothing is trained
  for (size_t unit = head_unit; unit-- > last;) {
    const UnitWeights& weights = stream_.get(unit);
    // In one order at every unit: sums have the same bits however many batches there are at once.
    for (size_t i = 0; i < batches.size(); ++i) backward_unit(unit, weights, i);
    const std::vector<Parameter> parameters = trained(unit, weights);
    stream_.release(unit);
    emit_gradients(unit, parameters);
  }
  return losses;
}

std::vector<double> UnitPass::train_stage() {
  using Way = StageLink::Way;
  StageLink& link = *stage_->link;
  const uint64_t count = batches_.size();
  std::vector<int64_t> sizes = batches_[0].tokens_BT.sizes().vec();
  sizes.push_back(model_.architecture().width);
  const size_t all = model_.units().size();
  uint64_t from_before = 0;
  uint64_t from_behind = 0;
  for (const Stage::Chunk& chunk : stage_->chunks) {
    if (chunk.begin > 0) from_before += count;
    if (chunk.end < all) from_behind += count;
  }
  link.begin_step(count);
  link.expect(Way::kForward, sizes, from_before, stage_->at_once);
  link.expect(Way::kBackward, sizes, from_behind, stage_->at_once);
  if (stage_->looped) stream_.start(order());
  std::vector<double> losses;
  stage_phases_.clear();
  size_t next_to_emit = all;
  for (const auto& [kind, i, number] : stage_->actions) {
    const Stage::Chunk& chunk = stage_->chunks[number];
    const bool forward = kind == plan::PipelineAction::Kind::kForward;
    const bool first = chunk.begin == 0;
    const bool last = chunk.end == all;
    if (forward && !first) inputs_.put(chunk.begin, i, link.receive(Way::kForward));
    if (!forward && !last) gradients_BTC_[i] = link.receive(Way::kBackward);
    const uint64_t begin_ns = base::now_ns();
    forward ? forward_stage(chunk, i) : backward_stage(chunk, i, losses);
    if (chunk.begin != model_.head() || !forward) {
      const char* const what = chunk.begin == model_.head() ? "head" : "backward";
      stage_phases_.push_back({forward ? "forward" : what, begin_ns, base::now_ns()});
    }
    if (forward && !last) link.send(Way::kForward, inputs_.take(chunk.end, i));
    if (forward) continue;
    const Tensor gradient_BTC = std::exchange(gradients_BTC_[i], Tensor());
    if (!first) link.send(Way::kBackward, gradient_BTC);
    if (stage_->looped && i + 1 == count) emit_stage(next_to_emit, chunk.begin);
  }
  link.finish();
  emit_stage(next_to_emit, 0);
  return losses;
}

void UnitPass::forward_stage(const Stage::Chunk& chunk, size_t batch) {
  const size_t end = std::min(chunk.end, model_.head());
  for (size_t unit = chunk.begin; unit < end; ++unit) {
    forward_unit(unit, hold(unit, batch), batch);
    let_go(unit, batch);
  }
}

void UnitPass::backward_stage(const Stage::Chunk& chunk, size_t batch,
                              std::vector<double>& losses) {
  if (chunk.end == model_.units().size()) {
    if (!held_head_) held_head_.emplace(get_head());
    losses.push_back(head_of(*held_head_, batch));
    if (!stage_->looped || batch + 1 == batches_.size()) {
      held_head_.reset();
      release_head();
    }
  }
  const size_t first = std::max<size_t>(chunk.begin, adapters_ == nullptr ? 0 : 1);
  for (size_t unit = std::min(chunk.end, model_.head()); unit-- > first;) {
    backward_unit(unit, hold(unit, batch), batch);
    let_go(unit, batch);
  }
}

const UnitWeights& UnitPass::hold(size_t unit, size_t batch) {
  held_.resize(model_.units().size());
  if (!stage_->looped || batch == 0) held_[unit] = &stream_.get(unit);
  return *held_[unit];
}

void UnitPass::let_go(size_t unit, size_t batch) {
  if (!stage_->looped || batch + 1 == batches_.size()) stream_.release(unit);
}

/// Units from the one before `next` down to `begin`: all ranks give all parameters, in one order.
void UnitPass::emit_stage(size_t& next, size_t begin) {
  for (begin = std::max<size_t>(begin, adapters_ == nullptr ? 0 : 1); next > begin;) {
    const auto elements = static_cast<int64_t>(model_.units()[--next].count);
    const Tensor none_N = torch::empty({elements}, torch::dtype(torch::kFloat32).device(at::kMeta));
    emit_gradients(next, trained(next, model_.weights_of(next, none_N)));
  }
}

Tensor UnitPass::run_layers(size_t unit, const UnitWeights& weights, const Tensor& input,
                            const DocumentEnds& documents, KeyValueCache* cache) const {
  std::span<const LayerAdapters> adapters;
  if (adapters_ != nullptr) adapters = adapters_->of(unit);
  return model_.run_layers(unit, weights, adapters, input, documents, cache);
}

std::vector<Parameter> UnitPass::trained(size_t unit, const UnitWeights& weights) const {
  if (adapters_ == nullptr) return weights;
  std::vector<Parameter> parameters;
  for (const LayerAdapters& layer : adapters_->of(unit)) {
    for (const Adapter& adapter : layer) {
      parameters.push_back(adapter.a);
      parameters.push_back(adapter.b);
    }
  }
  return parameters;
}

std::pair<UnitPass::Graph, Tensor> UnitPass::compute(size_t unit, const UnitWeights& weights,
                                                     const Tensor& input, size_t batch,
                                                     bool record) const {
  if (unit == 0) {
    const Tensor rows_BTC = input.defined() ? leaf(input) : input;
    Tensor y_BTC = model_.embed(weights, batches_[batch].tokens_BT, batches_[batch].document_ends,
                                /*cache=*/nullptr, rows_BTC);
    if (adapters_ != nullptr) return {Graph{{}, {}, nullptr}, y_BTC};
    Graph graph{torch::autograd::impl::gradient_edge(y_BTC), tensors_of(weights), nullptr};
    if (rows_BTC.defined()) graph.leaves.push_back(rows_BTC);
    return {std::move(graph), y_BTC};
  }
  Graph graph{{}, tensors_of(trained(unit, weights)), nullptr};
  graph.leaves.push_back(leaf(input));
  Tensor y_BTC;
  if (record) {
    graph.saved = SavedTensors::make();
    const SavedTensors::Recording recording(*graph.saved, all_of(weights), graph.leaves.back(),
                                            model_.tables());
    y_BTC = run_layers(unit, weights, graph.leaves.back(), batches_[batch].document_ends);
  } else {
    y_BTC = run_layers(unit, weights, graph.leaves.back(), batches_[batch].document_ends);
  }
  graph.output = torch::autograd::impl::gradient_edge(y_BTC);
  return {std::move(graph), std::move(y_BTC)};
}

/// A batch's rows of the embedding, where it is a table, while the next batch's are on their way.
Tensor UnitPass::rows_of(size_t batch) const {
  EmbeddingTable* const table = model_.table();
  if (table == nullptr) return {};
  Tensor rows_BTC = table->rows(batches_[batch].tokens_BT, /*keep=*/true);
  const Tensor next_BT =
      batch + 1 < batches_.size() ? batches_[batch + 1].tokens_BT : options_->tokens_behind_BT;
  if (next_BT.defined()) table->prefetch(next_BT);
  for (uint64_t i = 0; batch + 1 == batches_.size() && i < options_->lookups_behind; ++i) {
    table->rows(torch::empty({0}, torch::kInt64), /*keep=*/false);
  }
  return rows_BTC;
}

bool UnitPass::offloads(size_t unit, size_t batch) const {
  if (unit == 0 || !saved_) return false;
  const size_t batches = batches_.size();
  return is_offloaded((unit - 1) * batches + batch, to_offload_, saved_->in_memory(),
                      (model_.head() - 1) * batches);
}

void UnitPass::forward_unit(size_t unit, const UnitWeights& weights, size_t batch) {
  const Tensor input = unit > 0 ? inputs_.get(unit, batch) : rows_of(batch);
  const bool offloaded = offloads(unit, batch);
  Tensor y_BTC;
  if (recompute_ && !offloaded) {
    const torch::NoGradGuard no_grad;
    const Batch& tokens = batches_[batch];
    y_BTC = unit == 0 ? model_.embed(weights, tokens.tokens_BT, tokens.document_ends,
                                     /*cache=*/nullptr, input)
                      : run_layers(unit, weights, input, tokens.document_ends);
  } else {
    auto [graph, made] = compute(unit, weights, input, batch, offloaded);
    y_BTC = made.detach();
    made = Tensor();
    const bool fits = graph.saved == nullptr || graph.saved->bytes() <= saved_->bytes_max();
    if (fits && graph.saved != nullptr) {
      saved_->put(unit, batch, graph.saved->give_up());
      saved_->release(unit, batch);
      ++offloaded_;
      // The graph wants the input's gradient, not the input.
      Tensor& leaf_of_input = graph.leaves.back();
      leaf_of_input.set_data(torch::empty({0}, leaf_of_input.options().requires_grad(false)));
    }
    if (fits) graphs_[unit][batch] = std::move(graph);
  }
  inputs_.put(unit + 1, batch, std::move(y_BTC));
  if (unit > 0) inputs_.release(unit, batch);
}

/// The head first: a device can give an old unit's weights once it has given all.
UnitPass::Head UnitPass::get_head() {
  const UnitWeights& weights = stream_.get(model_.head());
  const UnitWeights& embedding = model_.tied_head() ? stream_.get(0) : weights;
  return {weights, model_.head_matrix(weights, embedding)};
}

void UnitPass::release_head() {
  if (model_.tied_head()) stream_.release(0);
  stream_.release(model_.head());
}

double UnitPass::head_of(const Head& head, size_t batch) {
  const torch::AutoGradMode mode(true);
  const Tensor x_BTC = leaf(inputs_.take(model_.head(), batch));
  const Tensor h_MC = model_.final_norm(head.weights, x_BTC);
  HeadGradients gradients;
  const double loss = head_loss(model_, h_MC, head.matrix_VC, batches_[batch],
                                options_->targets_per_batch, &gradients);
  std::vector<Tensor> leaves{x_BTC};
  const size_t of_norm =
      adapters_ != nullptr ? 0 : head.weights.size() - (model_.tied_head() ? 0 : 1);
  for (size_t p = 0; p < of_norm; ++p) leaves.push_back(head.weights[p].weight);
  auto made = torch::autograd::grad({h_MC}, leaves, {gradients.h_MC});
  gradients_BTC_[batch] = std::move(made[0]);
  if (adapters_ != nullptr) return loss;
  auto& sums = sums_[model_.head()];
  sums.resize(head.weights.size());
  for (size_t p = 0; p < of_norm; ++p) add_gradient(sums[p], std::move(made[p + 1]));
  add_gradient(model_.tied_head() ? tied_sums_ : sums.back(), std::move(gradients.matrix_VC));
  return loss;
}

/// The graph that forward left, or that is computed again.
UnitPass::Graph UnitPass::graph_of(size_t unit, const UnitWeights& weights, size_t batch) {
  Tensor input = unit > 0 ? inputs_.take(unit, batch) : Tensor();
  if (unit == 0 && model_.table() != nullptr) {  // the gradient needs no values of rows
    const Tensor& gradient_BTC = gradients_BTC_[batch];
    input = torch::zeros({1}, gradient_BTC.options()).expand_as(gradient_BTC);
  }
  Graph graph = std::exchange(graphs_[unit][batch], Graph());
  if (graph.leaves.empty()) return compute(unit, weights, input, batch, /*record=*/false).first;
  if (graph.saved != nullptr) {
    graph.saved->found_in(saved_->take(unit, batch), all_of(weights), input);
  }
  return graph;
}

void UnitPass::backward_unit(size_t unit, const UnitWeights& weights, size_t batch) {
  const torch::AutoGradMode mode(true);
  Graph graph = graph_of(unit, weights, batch);
  const std::vector<Parameter> parameters = trained(unit, weights);
  torch::autograd::edge_list wanted;
  for (const Tensor& tensor : graph.leaves) {
    wanted.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  auto made = torch::autograd::Engine::get_default_engine().execute(
      {graph.output}, {gradients_BTC_[batch]}, /*keep_graph=*/false, /*create_graph=*/false,
      /*accumulate_grad=*/false, wanted);
  if (unit > 0) {
    gradients_BTC_[batch] = std::move(made.back());
  } else if (model_.table() != nullptr) {
    model_.table()->add_gradient(batches_[batch].tokens_BT, made.back());
  }
  sums_[unit].resize(parameters.size());
  for (size_t p = 0; p < parameters.size(); ++p) {
    // The gradient of an expert that no token went through.
    if (!made[p].defined()) made[p] = torch::zeros_like(parameters[p].weight);
    add_gradient(sums_[unit][p], std::move(made[p]));
  }
}

void UnitPass::add_gradient(std::optional<GradientTree>& sums, Tensor gradient) const {
  if (!sums) sums.emplace(options_->micro_batches, options_->mine, options_->by_tree);
  sums->add(std::move(gradient));
}

void UnitPass::emit_gradients(size_t unit, std::span<const Parameter> parameters) {
  if (options_->first + batches_.size() < options_->mine.end) return;
  auto sums = std::exchange(sums_[unit], {});
  sums.resize(parameters.size());  // another stage's: none
  for (size_t p = sums.size(); p-- > 0;) {
    Gradient gradient{parameters[p].first, static_cast<uint64_t>(parameters[p].weight.numel()), {}};
    if (sums[p]) gradient.sums = sums[p]->take();
    // An embedding that is the head's matrix too: both shares.
    if (unit == 0 && p == 0 && model_.tied_head()) {
      std::vector<Tensor> tied;
      if (auto sum = std::exchange(tied_sums_, {})) tied = sum->take();
      const bool all = options_->mine.begin == 0 && options_->mine.end == options_->micro_batches;
      if (all && !stage_) {
        gradient.sums.front() = tied.front().add_(gradient.sums.front());
      } else {
        gradient.trees = 2;
        gradient.sums.insert(gradient.sums.begin(), tied.begin(), tied.end());
      }
    }
    options_->take_gradient(std::move(gradient));
  }
}

std::vector<Tensor> UnitPass::forward_without_gradients(std::span<const Input> inputs,
                                                        const std::function<void()>& before_unit) {
  if (adapters_ != nullptr) throw_if_error(adapters_->wait_all());
  std::vector<Tensor> all_BTC(inputs.size());
  std::vector<Stage::Chunk> chunks{{0, model_.units().size()}};
  if (stage_) chunks = stage_->chunks;
  for (const Stage::Chunk& chunk : chunks) {
    for (size_t i = 0; chunk.begin > 0 && i < inputs.size(); ++i) {
      std::vector<int64_t> sizes = inputs[i].tokens_BT.sizes().vec();
      sizes.push_back(model_.architecture().width);
      stage_->link->expect(StageLink::Way::kForward, std::move(sizes), 1);
      all_BTC[i] = stage_->link->receive(StageLink::Way::kForward);
    }
    for (size_t unit = chunk.begin; unit < std::min(chunk.end, model_.head()); ++unit) {
      if (before_unit) before_unit();
      const UnitWeights& weights = stream_.get(unit);
      for (size_t i = 0; i < inputs.size(); ++i) {
        const auto& [tokens_BT, documents, cache] = inputs[i];
        all_BTC[i] = unit == 0 ? model_.embed(weights, tokens_BT, documents, cache)
                               : run_layers(unit, weights, all_BTC[i], documents, cache);
      }
      stream_.release(unit);
    }
    if (chunk.end == model_.units().size()) break;
    for (const Tensor& x_BTC : all_BTC) stage_->link->send(StageLink::Way::kForward, x_BTC);
  }
  return all_BTC;
}

double UnitPass::loss(const Batch& batch) {
  const torch::NoGradGuard no_grad;
  stream_.start(forward_order());
  const Input input{batch.tokens_BT, batch.document_ends};
  const std::vector<Tensor> x_BTC = forward_without_gradients({&input, 1}, {});
  if (!has_head()) return 0;
  const Head head = get_head();
  const Tensor h_MC = model_.final_norm(head.weights, x_BTC.front());
  const double loss =
      head_loss(model_, h_MC, head.matrix_VC, batch, static_cast<double>(batch.targets), nullptr);
  release_head();
  return loss;
}

std::vector<Tensor> UnitPass::next_logits(std::span<const Continued> sequences,
                                          const std::function<void()>& before_unit) {
  const torch::NoGradGuard no_grad;
  // Twice: units of the next token are read while this one's last units compute.
  std::vector<uint32_t> order = forward_order();
  const size_t once = order.size();
  order.resize(2 * once);
  std::copy_n(order.begin(), once, order.begin() + static_cast<std::ptrdiff_t>(once));
  stream_.start(std::move(order));
  std::vector<Input> inputs;
  for (const auto& [tokens_1T, cache] : sequences) inputs.push_back({tokens_1T, {}, cache});
  const std::vector<Tensor> all_1TC = forward_without_gradients(inputs, before_unit);
  std::vector<Tensor> logits_V(inputs.size());
  if (has_head()) {
    const Head head = get_head();
    for (size_t i = 0; i < inputs.size(); ++i) {
      const int64_t tokens = all_1TC[i].size(1);
      const Tensor h_1C = model_.final_norm(head.weights, all_1TC[i].narrow(1, tokens - 1, 1));
      logits_V[i] = model_.logits(h_1C, head.matrix_VC)[0];
    }
    release_head();
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (stage_) {
      logits_V[i] = stage_->link->from_head(logits_V[i], model_.architecture().vocabulary);
    }
    sequences[i].cache->advance(all_1TC[i].size(1));
  }
  return logits_V;
}

void UnitPass::fill_caches(std::span<const Begun> sequences,
                           const std::function<void()>& before_unit) {
  const torch::NoGradGuard no_grad;
  std::vector<uint32_t> order = forward_order();
  order.resize(model_.head());
  stream_.start(std::move(order));
  std::vector<Input> inputs;
  for (const auto& [tokens_1T, cache] : sequences) inputs.push_back({tokens_1T, {}, cache});
  forward_without_gradients(inputs, before_unit);
}

}  // namespace smartinf::train
