#include "workloads/gnn/epochs.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <numeric>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/graph/neighbourhood.h"
#include "smartinf/model/safetensors.h"

namespace smartinf::workloads {

using base::ErrorCode;
using base::Result;
using base::Status;
using graph::Vertex;

namespace {

constexpr uint64_t kRowsAtOnce = 1 << 14;
/// Rows are shared out as the parameters' subgroups are: so many more of these, which nothing reads
/// or writes, spread them over the devices.
constexpr uint64_t kSpreadBlocks = 16;

std::vector<EpochPlan::Table> tables_of(std::span<const Layer> layers, size_t& sets) {
  std::vector<EpochPlan::Table> tables{{"features", layers[0].in, false}};
  for (size_t l = 1; l < layers.size(); ++l) {
    tables.push_back({fmt::format("activations.{}", l), layers[l].in, false});
  }
  sets = std::min<size_t>(2, layers.size() - 1);
  for (size_t set = 0; set < sets; ++set) {
    for (const char* part : {"own", "neighbours"}) {
      tables.push_back({fmt::format("gradients.{}.{}", set, part), layers[1].in, false});
    }
  }
  return tables;
}

/// Of the two tables of gradients that a layer puts for the one before it.
size_t gradients(const EpochPlan& plan, size_t layers, size_t layer, bool to_neighbours) {
  const size_t sets = (plan.tables.size() - layers) / 2;
  return layers + layer % sets * 2 + (to_neighbours ? 1 : 0);
}

bool has_own(const Layer& layer) { return layer.model != Model::kGcn; }

std::vector<int64_t> ids_of(const Part& part, bool with_halo) {
  std::vector<int64_t> ids(part.count);
  std::iota(ids.begin(), ids.end(), int64_t{part.first});
  if (with_halo) ids.insert(ids.end(), part.halo.begin(), part.halo.end());
  return ids;
}

std::vector<Part> make_parts(const Graph& graph, uint32_t count) {
  const size_t blocks = graph.blocks.size() - 1;
  graph::Neighbourhood around(graph.csr);
  std::vector<Part> parts(count);
  for (uint32_t p = 0; p < count; ++p) {
    Part& part = parts[p];
    part.first_block = blocks * p / count;
    part.end_block = blocks * (p + 1) / count;
    part.first = graph.blocks[part.first_block];
    part.count = graph.blocks[part.end_block] - part.first;
    std::vector<Vertex> own(part.count);
    std::iota(own.begin(), own.end(), part.first);
    graph::HopOrder order = around.within(own, 1);
    part.halo.assign(order.vertices.begin() + static_cast<int64_t>(order.ends[0]),
                     order.vertices.end());
  }
  return parts;
}

uint64_t bytes_of(std::span<const Part> parts, std::span<const Layer> layers) {
  uint64_t most = 0;
  for (const Part& part : parts) {
    uint64_t gathered = 0;  // of a pass backward: what the layer begins with, and two gradients
    for (size_t l = 0; l < layers.size(); ++l) {
      const uint64_t out = l + 1 < layers.size() ? layers[l].out : 0;
      gathered = std::max(gathered, part.rows() * (layers[l].in + out) + part.count * out);
    }
    // Once in use, once for the next part, and once on the way from a device.
    const uint64_t floats = 3 * gathered + part.count * LayerPass::floats_of_vertex(layers);
    most = std::max(most, floats * sizeof(float));
  }
  return most;
}

}  // namespace

Result<EpochPlan> plan_epoch(const Graph& graph, std::span<const Layer> layers,
                             const EpochOptions& options) {
  EpochPlan plan;
  const auto blocks = static_cast<uint32_t>(graph.blocks.size() - 1);
  if (options.parts > blocks) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} parts, and the graph has {} blocks", options.parts, blocks),
                  "Take fewer parts, or partition the graph into smaller blocks.");
  }
  const uint64_t room = options.memory_bytes / 2;
  for (uint32_t count = std::max(1u, options.parts);; count = std::min(2 * count, blocks)) {
    plan.parts = make_parts(graph, count);
    plan.part_bytes = bytes_of(plan.parts, layers);
    if (plan.part_bytes <= room) break;
    if (options.parts > 0 || count == blocks) {
      return Status(
          ErrorCode::kOutOfMemory,
          fmt::format("the largest of {} parts takes {} with its neighbours' rows, and half "
                      "of the memory is {}",
                      count, base::format_bytes(plan.part_bytes), base::format_bytes(room)),
          fmt::format("Allow --memory {}{}.", base::format_bytes(2 * plan.part_bytes),
                      count == blocks ? ", or partition the graph into smaller blocks"
                                      : ", or more --parts"));
    }
  }
  size_t sets = 0;
  plan.tables = tables_of(layers, sets);
  uint64_t left = std::min(options.keep_bytes, options.memory_bytes / 4);
  for (EpochPlan::Table& table : plan.tables) {
    const uint64_t bytes = uint64_t{graph.csr.vertices()} * table.dim * sizeof(float);
    table.in_memory = bytes <= left;
    if (table.in_memory) left -= bytes;
  }
  plan.table_memory_bytes = options.memory_bytes / 4;
  const auto gathers = [&](size_t table, const Part& part, bool with_halo) {
    if (plan.tables[table].in_memory) return;
    const uint64_t rows = with_halo ? part.rows() : part.count;
    plan.rows_gathered += rows;
    plan.up_bytes += rows * plan.tables[table].dim * sizeof(float);
    plan.down_bytes += rows * sizeof(uint32_t);
  };
  const auto puts = [&](size_t table, const Part& part) {
    if (plan.tables[table].in_memory) return;
    plan.rows_put += part.count;
    plan.down_bytes += part.count * (plan.tables[table].dim * sizeof(float) + sizeof(uint32_t));
  };
  const size_t last = layers.size() - 1;
  for (const Part& part : plan.parts) {
    for (size_t l = 0; l <= last; ++l) {
      const bool halo = layers[l].neighbours();
      gathers(l, part, halo);
      if (l < last) {
        puts(l + 1, part);
        gathers(l, part, halo);
        if (has_own(layers[l])) gathers(gradients(plan, last + 1, l + 1, false), part, false);
        if (halo) gathers(gradients(plan, last + 1, l + 1, true), part, true);
      }
      if (l == 0) continue;
      if (has_own(layers[l])) puts(gradients(plan, last + 1, l, false), part);
      if (halo) puts(gradients(plan, last + 1, l, true), part);
    }
  }
  return plan;
}

Epochs::Epochs(const Graph& graph, const EpochOptions& options, std::vector<Layer> layers)
    : graph_(graph), options_(options), layers_(std::move(layers)) {
  identity_ = fmt::format(
      "{} of {} layers and {} hidden features, on graph {:016x} of {} vertices, {} edges, {} "
      "features "
      "and {} classes",
      base::enum_name(options.model.model), options.model.layers, options.model.hidden,
      graph.digest, graph.csr.vertices(), graph.csr.edges() / 2, graph.feature_count,
      graph.classes);
}

Result<std::unique_ptr<Epochs>> Epochs::open(const Graph& graph, const EpochOptions& options) {
  std::unique_ptr<Epochs> made(
      new Epochs(graph, options, layers_of(options.model, graph.feature_count, graph.classes)));
  SI_RETURN_IF_ERROR(made->begin());
  return made;
}

Status Epochs::begin() {
  SI_ASSIGN_OR_RETURN(plan_, plan_epoch(graph_, layers_, options_));
  for (size_t v = 0; v < graph_.labels.size(); ++v) {
    trained_.push_back(graph_.split[v] == Split::kTrain ? graph_.labels[v] : -1);
  }
  space_ = space_of(layers_);
  parameter_count_ = space_.count();
  const uint64_t spread = base::round_up(parameter_count_, base::kBlockElements) -
                          parameter_count_ + kSpreadBlocks * base::kBlockElements;
  SI_RETURN_IF_ERROR(space_.add("spread", {spread}, 1));
  parameters_.resize(space_.count());
  gradient_.resize(parameter_count_);

  engine::UpdaterOptions engine;
  for (const std::string& path : options_.devices) {
    engine.devices.emplace_back().path = path;
  }
  engine.rule.rule = kernels::UpdateRule::kAdam;
  engine.gradient_type = base::DataType::kF32;
  engine.subgroup_elements = base::kBlockElements;
  engine.memory_budget_bytes = uint64_t{64} << 20;
  engine.table_memory_bytes = plan_.table_memory_bytes;
  engine.create = options_.create;
  for (size_t t = 0; t < plan_.tables.size(); ++t) {
    engine::TableOptions& table = engine.tables.emplace_back();
    table.name = plan_.tables[t].name;
    table.rows = graph_.csr.vertices();
    table.dim = plan_.tables[t].dim;
    table.kind = t == 0 ? storage::RowTableKind::kData : storage::RowTableKind::kScratch;
  }
  SI_ASSIGN_OR_RETURN(updater_, engine::Updater::open(engine, space_));
  fresh_ = updater_->fresh();
  if (!fresh_) {
    const nlohmann::json record = base::parse_json(updater_->client_metadata());
    const std::string held = record.is_object() ? record.value("run", "") : "";
    if (held != identity_) {
      return Status(ErrorCode::kMismatch,
                    fmt::format("the devices hold a run of another kind: {}; this one is {}",
                                held.empty() ? "no graph network" : held, identity_),
                    "Name other directories for this run.");
    }
    done_ = record.value("epoch", uint64_t{0});
  }
  in_memory_.resize(plan_.tables.size());
  for (size_t t = 0; t < plan_.tables.size(); ++t) {
    if (!plan_.tables[t].in_memory) continue;
    in_memory_[t].resize(uint64_t{graph_.csr.vertices()} * plan_.tables[t].dim);
  }
  SI_RETURN_IF_ERROR(put_features());
  if (fresh_) {
    const std::vector<float> initial = initial_parameters(layers_, options_.seed);
    SI_RETURN_IF_ERROR(updater_->initialize(
        [&](uint64_t first, std::span<float> out) {
          for (size_t i = 0; i < out.size(); ++i) {
            out[i] = first + i < initial.size() ? initial[first + i] : 0.0f;
          }
          return Status();
        },
        nlohmann::json{{"run", identity_}, {"epoch", 0}}.dump()));
  }
  SI_RETURN_IF_ERROR(updater_->load_weights(
      base::DataType::kF32, [&](uint64_t first) { return parameters_.data() + first; }));
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  layer_pass_ = std::make_unique<LayerPass>(graph_.csr, graph_.blocks, parameters_,
                                            options_.threads > 0 ? options_.threads : cores);
  return Status();
}

/// In the order of the file: to the devices when the run begins, and to memory where they stay.
Status Epochs::put_features() {
  const std::vector<Vertex> number = graph::inverse(graph_.order);
  const uint64_t dim = graph_.feature_count;
  std::vector<float> some;
  std::vector<int64_t> ids;
  for (uint64_t row = 0; row < number.size(); row += kRowsAtOnce) {
    if (!fresh_ && in_memory_[0].empty()) return Status();
    ids.assign(number.begin() + static_cast<int64_t>(row),
               number.begin() + static_cast<int64_t>(std::min(number.size(), row + kRowsAtOnce)));
    some.resize(ids.size() * dim);
    SI_RETURN_IF_ERROR(graph_.features.read(row * dim, std::span(some)));
    if (const auto bad = std::ranges::find_if_not(some, [](float x) { return std::isfinite(x); });
        bad != some.end()) {
      const uint64_t at = row * dim + static_cast<uint64_t>(bad - some.begin());
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("feature {} of row {} of {} is not finite", at % dim, at / dim,
                                graph_.features.path()));
    }
    if (fresh_) SI_RETURN_IF_ERROR(updater_->tables()->put(0, ids, some));
    for (size_t i = 0; !in_memory_[0].empty() && i < ids.size(); ++i) {
      std::copy_n(some.begin() + static_cast<int64_t>(i * dim), dim,
                  in_memory_[0].begin() + ids[i] * static_cast<int64_t>(dim));
    }
  }
  return Status();
}

Result<Epochs::Gathered> Epochs::gather(const Part& part, std::span<const Wanted> wanted) {
  Gathered gathered;
  for (const Wanted& want : wanted) {
    const uint64_t dim = plan_.tables[want.table].dim;
    const std::vector<int64_t> ids = ids_of(part, want.with_halo);
    std::vector<float>& rows = gathered.emplace_back(ids.size() * dim);
    const std::vector<float>& held = in_memory_[want.table];
    for (size_t i = 0; !held.empty() && i < ids.size(); ++i) {
      std::copy_n(held.begin() + ids[i] * static_cast<int64_t>(dim), dim,
                  rows.begin() + static_cast<int64_t>(i * dim));
    }
    if (!held.empty()) continue;
    const std::lock_guard lock(tables_mutex_);
    SI_RETURN_IF_ERROR(updater_->tables()->gather(want.table, ids, base::DataType::kF32,
                                                  rows.data(), /*keep=*/false));
  }
  return gathered;
}

Status Epochs::put(size_t table, const Part& part, std::span<const float> values) {
  if (std::vector<float>& held = in_memory_[table]; !held.empty()) {
    std::ranges::copy(values,
                      held.begin() + int64_t{part.first} * int64_t{plan_.tables[table].dim});
    return Status();
  }
  const std::lock_guard lock(tables_mutex_);
  return updater_->tables()->put(table, ids_of(part, false), values);
}

template <typename Compute>
Status Epochs::over_parts(std::vector<Wanted> wanted, const Compute& compute) {
  const auto start = [&](size_t p) {
    return std::async(std::launch::async, [&, p] { return gather(plan_.parts[p], wanted); });
  };
  std::future<Result<Gathered>> next = start(0);
  for (size_t p = 0; p < plan_.parts.size(); ++p) {
    const Result<Gathered> rows = next.get();
    SI_RETURN_IF_ERROR(rows.status());
    if (p + 1 < plan_.parts.size()) next = start(p + 1);
    SI_RETURN_IF_ERROR(compute(plan_.parts[p], *rows));
  }
  return Status();
}

Result<EpochReport> Epochs::pass(bool trains) {
  EpochReport report;
  report.epoch = done_;
  const uint64_t begin_ns = base::now_ns();
  const engine::UpdaterTraffic before = updater_->traffic();
  std::ranges::fill(gradient_, 0.0f);
  std::array<uint64_t, 3> right{};
  std::array<uint64_t, 3> all{};
  const size_t last = layers_.size() - 1;
  const auto scale = static_cast<float>(1.0 / static_cast<double>(graph_.train_count));
  /// Hands on what the layer before needs.
  const auto hand_on = [&](size_t l, const Part& part,
                           LayerPass::InputGradient gradient) -> Status {
    if (l == 0) return Status();
    if (has_own(layers_[l])) {
      SI_RETURN_IF_ERROR(put(gradients(plan_, last + 1, l, false), part, gradient.own));
    }
    if (!layers_[l].neighbours()) return Status();
    return put(gradients(plan_, last + 1, l, true), part, gradient.to_neighbours);
  };
  for (size_t l = 0; l <= last; ++l) {
    const Layer& layer = layers_[l];
    SI_RETURN_IF_ERROR(over_parts(
        {{l, layer.neighbours()}}, [&](const Part& part, const Gathered& rows) -> Status {
          const std::span<float> values = layer_pass_->forward(layer, part, rows[0]);
          if (l < last) return put(l + 1, part, values);
          const LayerPass::Outcome outcome = layer_pass_->loss(part, trained_, scale, values);
          for (const double loss : outcome.block_losses) report.loss += loss;
          for (size_t i = 0; i < part.count; ++i) {
            const auto split = static_cast<size_t>(graph_.split[part.first + i]);
            if (split > 2) continue;
            ++all[split];
            right[split] +=
                static_cast<int32_t>(outcome.predicted[i]) == graph_.labels[part.first + i];
          }
          if (!trains) return Status();
          return hand_on(l, part, layer_pass_->backward(layer, part, values, gradient_, l > 0));
        }));
  }
  for (size_t l = last; trains && l-- > 0;) {
    const Layer& layer = layers_[l];
    const Layer& above = layers_[l + 1];
    std::vector<Wanted> wanted{{l, layer.neighbours()}};
    if (has_own(above)) wanted.push_back({gradients(plan_, last + 1, l + 1, false), false});
    if (above.neighbours()) wanted.push_back({gradients(plan_, last + 1, l + 1, true), true});
    SI_RETURN_IF_ERROR(over_parts(wanted, [&](const Part& part, const Gathered& rows) {
      (void)layer_pass_->forward(layer, part, rows[0]);
      const std::vector<float> none;
      const std::span<const float> gradient = layer_pass_->collect(
          above, part, has_own(above) ? rows[1] : none, above.neighbours() ? rows.back() : none);
      return hand_on(l, part, layer_pass_->backward(layer, part, gradient, gradient_, l > 0));
    }));
  }
  report.loss /= static_cast<double>(graph_.train_count);
  for (size_t i = 0; i < 3; ++i) {
    report.accuracy[i] =
        static_cast<double>(right[i]) / static_cast<double>(std::max<uint64_t>(1, all[i]));
  }
  const engine::UpdaterTraffic moved = updater_->traffic().since(before);
  report.up_bytes = moved.host_link.up_total();
  report.down_bytes = moved.host_link.down_total();
  report.seconds = base::seconds_since(begin_ns);
  return report;
}

Status Epochs::update() {
  SI_RETURN_IF_ERROR(updater_->begin_step());
  SI_RETURN_IF_ERROR(
      updater_->put_gradient(0, gradient_.data(), base::DataType::kF32, parameter_count_));
  SI_RETURN_IF_ERROR(updater_->skip_gradient(parameter_count_, space_.count() - parameter_count_));
  SI_ASSIGN_OR_RETURN(const engine::GradientSummary summary, updater_->finish_gradients(1));
  if (!std::isfinite(summary.norm)) {
    (void)updater_->abort();
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("the gradient of epoch {} is not finite", done_ + 1),
                  "Take a smaller --lr, or scale the features.");
  }
  engine::UpdateOptions options;
  options.groups = {{.lr = options_.lr}, {.lr = 0, .skip = true}};
  SI_RETURN_IF_ERROR(
      updater_->start_update(options, base::DataType::kF32, [&](uint64_t first) -> void* {
        return first < parameter_count_ ? parameters_.data() + first : nullptr;
      }));
  SI_RETURN_IF_ERROR(
      updater_->commit(nlohmann::json{{"run", identity_}, {"epoch", done_ + 1}}.dump()));
  ++done_;
  return Status();
}

Result<EpochReport> Epochs::train() {
  SI_ASSIGN_OR_RETURN(EpochReport report, pass(true));
  const uint64_t begin_ns = base::now_ns();
  SI_RETURN_IF_ERROR(update());
  report.epoch = done_;
  report.seconds += base::seconds_since(begin_ns);
  return report;
}

Status Epochs::write_parameters(const std::string& path) const {
  std::vector<model::TensorInfo> tensors;
  for (const plan::ParameterRange& range : space_.ranges()) {
    if (range.first < parameter_count_) {
      tensors.push_back({range.name, base::DataType::kF32, range.shape});
    }
  }
  SI_ASSIGN_OR_RETURN(model::SafetensorsWriter writer,
                      model::SafetensorsWriter::create(path, tensors, {}));
  SI_RETURN_IF_ERROR(
      writer.append(base::DataType::kF32, std::span(parameters_).first(parameter_count_)));
  return writer.finish();
}

}  // namespace smartinf::workloads
