#include "workloads/gnn/epochs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <future>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
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
constexpr uint32_t kElsewhere = ~uint32_t{0};

}  // namespace

Epochs::Epochs(const Graph& graph, const EpochOptions& options, std::vector<Layer> layers)
    : graph_(graph),
      options_(options),
      layers_(std::move(layers)),
      exchange_(options_.ranks, plan_) {
  identity_ = fmt::format(
      "{} of {} layers and {} hidden features, on graph {:016x} of {} vertices, {} edges, {} "
      "features "
      "and {} classes",
      base::enum_name(options.model.model), options.model.layers, options.model.hidden,
      graph.digest, graph.csr.vertices(), graph.csr.edges() / 2, graph.feature_count,
      graph.classes);
  const RankOptions& ranks = options.ranks;
  if (ranks.ranks == 1 && ranks.batches == 1) return;
  identity_ += fmt::format(", by {} ranks on {} servers, ", ranks.ranks, ranks.servers);
  if (ranks.sampling) {
    identity_ += fmt::format("on samples of {} hops, {} neighbours and seed {}",
                             ranks.sampling->hops, ranks.sampling->fanout, ranks.sampling->seed);
  } else {
    identity_ += fmt::format("with {} hops preloaded", ranks.preload);
  }
  if (ranks.batches > 1) identity_ += fmt::format(", in {} batches", ranks.batches);
}

Result<std::unique_ptr<Epochs>> Epochs::open(const Graph& graph, const EpochOptions& options) {
  std::unique_ptr<Epochs> made(
      new Epochs(graph, options, layers_of(options.model, graph.feature_count, graph.classes)));
  SI_RETURN_IF_ERROR(made->begin());
  return made;
}

Status Epochs::begin() {
  Result<std::vector<EpochPlan>> plans = plan_epoch(graph_, layers_, options_);
  if (plans.ok()) {
    plans_ = std::move(*plans);
    std::swap(plan_, plans_[0]);
  }
  SI_RETURN_IF_ERROR(exchange_.all_ok(identity_, plans.ok() ? open_devices() : plans.status()));
  return share_parameters(Status());
}

void Epochs::take(uint32_t batch) {
  if (layer_pass_ != nullptr && batch == batch_) return;
  std::swap(plan_, plans_[batch_]);
  std::swap(plan_, plans_[batch]);
  batch_ = batch;
  const auto& bounds = plan_.spread.bounds;
  const uint32_t of_server = plan_.spread.ranks_of_server();
  const uint32_t first = options_.ranks.rank / of_server * of_server;
  trained_.resize(graph_.labels.size());
  for (size_t v = 0; v < graph_.labels.size(); ++v) {
    const bool other = plan_.sample && (v < bounds[first] || v >= bounds[first + of_server]);
    trained_[v] = graph_.split[v] == Split::kTrain && !other ? graph_.labels[v] : -1;
  }
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  layer_pass_ = std::make_unique<LayerPass>(plan_.sample ? *plan_.sample : graph_.csr, parameters_,
                                            options_.threads > 0 ? options_.threads : cores);
}

Status Epochs::open_devices() {
  row_of_.resize(graph_.csr.vertices());
  for (size_t row = 0; row < plan_.vertices.size(); ++row) {
    row_of_[plan_.vertices[row]] = static_cast<uint32_t>(row);
  }
  sums_.resize(layers_.size());
  parameter_count_ = space_of(layers_).count();
  if (first_rank()) space_ = space_of(layers_);
  const uint64_t spread = base::round_up(space_.count(), base::kBlockElements) - space_.count() +
                          kSpreadBlocks * base::kBlockElements;
  SI_RETURN_IF_ERROR(space_.add("spread", {spread}, 1));
  parameters_.resize(std::max(space_.count(), parameter_count_));

  engine::UpdaterOptions engine;
  for (const std::string& path : options_.devices) {
    std::string& own = engine.devices.emplace_back().path;
    own = path;
    if (options_.ranks.ranks == 1) continue;
    own += fmt::format("/rank.{}", options_.ranks.rank);
    std::error_code failed;
    if (options_.create) std::filesystem::create_directories(own, failed);
  }
  engine.rule.rule = kernels::UpdateRule::kAdam;
  engine.gradient_type = base::DataType::kF32;
  engine.subgroup_elements = base::kBlockElements;
  engine.memory_budget_bytes = uint64_t{64} << 20;
  engine.table_memory_bytes = plan_.table_memory_bytes;
  engine.create = options_.create;
  engine.pin_threads = options_.ranks.ranks == 1;
  for (size_t t = 0; t < plan_.tables.size(); ++t) {
    engine::TableOptions& table = engine.tables.emplace_back();
    table.name = plan_.tables[t].name;
    table.rows = plan_.vertices.size();
    table.dim = plan_.tables[t].dim;
    table.kind =
        t == 0 && !features_come() ? storage::RowTableKind::kData : storage::RowTableKind::kScratch;
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
    const uint64_t batch = record.value("batch", uint64_t{0});
    done_ = record.value("epoch", uint64_t{0}) * options_.ranks.batches + batch;
    if (batch > 0) {
      current_.loss = record.value("loss", 0.0);
      current_.counts = record.value("counts", current_.counts);
    }
  }
  in_memory_.resize(plan_.tables.size());
  halos_.resize(plan_.tables.size());
  for (size_t t = 0; t < plan_.tables.size(); ++t) {
    const auto& [name, dim, all, halo] = plan_.tables[t];
    if (all) in_memory_[t].resize(plan_.vertices.size() * dim);
    if (halo) halos_[t].resize(plan_.shared.size() * dim);
  }
  shared_at_.assign(plan_.vertices.size(), kElsewhere);
  for (uint32_t i = 0; i < plan_.shared.size(); ++i) shared_at_[row_of_[plan_.shared[i]]] = i;
  SI_RETURN_IF_ERROR(put_features());
  if (fresh_) {
    SI_ASSIGN_OR_RETURN(const std::vector<float> initial, first_parameters());
    SI_RETURN_IF_ERROR(updater_->initialize(
        [&](uint64_t first_element, std::span<float> out) {
          for (size_t i = 0; i < out.size(); ++i) {
            out[i] = first_element + i < initial.size() ? initial[first_element + i] : 0.0f;
          }
          return Status();
        },
        nlohmann::json{{"run", identity_}, {"epoch", 0}}.dump()));
  }
  return updater_->load_weights(base::DataType::kF32,
                                [&](uint64_t at) { return parameters_.data() + at; });
}

Result<std::vector<float>> Epochs::first_parameters() const {
  std::vector<float> values;
  if (!first_rank()) return values;
  if (options_.start.empty()) return initial_parameters(layers_, options_.seed);
  SI_ASSIGN_OR_RETURN(const auto file, model::SafetensorsFile::open(options_.start));
  const plan::ParameterSpace space = space_of(layers_);
  for (const plan::ParameterRange& range : space.ranges()) {
    const std::span<const std::byte> bytes = file.tensor(range.name);
    const size_t at = values.size();
    values.resize(at + range.count);
    if (bytes.size() != range.count * sizeof(float)) {
      return Status(ErrorCode::kMismatch,
                    fmt::format("{} has {} bytes of {}, and the network {}", options_.start,
                                bytes.size(), range.name, range.count * sizeof(float)),
                    "Give the --model, --layers and --hidden that it was written with.");
    }
    std::memcpy(values.data() + at, bytes.data(), bytes.size());
  }
  return values;
}

/// In the order of the file: to the devices when the run begins, and to memory where they stay.
Status Epochs::put_features() {
  std::vector<Vertex> vertex_of(graph_.csr.vertices(), kElsewhere);  // of each row of the file
  for (size_t i = 0; i < plan_.features; ++i) {
    vertex_of[graph_.order[plan_.vertices[i]]] = plan_.vertices[i];
  }
  const uint64_t dim = graph_.feature_count;
  const bool puts = fresh_ || features_come();  // scratch rows are lost when a run is closed
  std::vector<float> some, kept;
  std::vector<Vertex> vertices;
  for (uint64_t row = 0; row < vertex_of.size(); row += kRowsAtOnce) {
    if (!puts && in_memory_[0].empty()) return Status();
    const uint64_t count = std::min(vertex_of.size() - row, kRowsAtOnce);
    some.resize(count * dim);
    SI_RETURN_IF_ERROR(graph_.features.read(row * dim, std::span(some)));
    if (const auto bad = std::ranges::find_if_not(some, [](float x) { return std::isfinite(x); });
        bad != some.end()) {
      const uint64_t at = row * dim + static_cast<uint64_t>(bad - some.begin());
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("feature {} of row {} of {} is not finite", at % dim, at / dim,
                                graph_.features.path()));
    }
    vertices.clear();
    kept.clear();
    for (uint64_t i = 0; i < count; ++i) {
      if (vertex_of[row + i] == kElsewhere) continue;
      vertices.push_back(vertex_of[row + i]);
      kept.insert(kept.end(), some.begin() + static_cast<int64_t>(i * dim),
                  some.begin() + static_cast<int64_t>((i + 1) * dim));
    }
    const std::vector<int64_t> ids = rows_of(vertices);
    if (puts) SI_RETURN_IF_ERROR(updater_->tables()->put(0, ids, kept));
    if (!in_memory_[0].empty()) SI_RETURN_IF_ERROR(write(0, vertices, kept));
  }
  return Status();
}

std::vector<int64_t> Epochs::rows_of(std::span<const Vertex> vertices) const {
  std::vector<int64_t> rows;
  rows.reserve(vertices.size());
  for (const Vertex v : vertices) rows.push_back(row_of_[v]);
  return rows;
}

Status Epochs::read(size_t table, std::span<const Vertex> vertices, std::span<float> out,
                    bool halo) {
  const uint64_t dim = plan_.tables[table].dim;
  const std::vector<int64_t> rows = rows_of(vertices);
  halo = halo && !halos_[table].empty();
  if (const std::vector<float>& held = halo ? halos_[table] : in_memory_[table]; !held.empty()) {
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto row = static_cast<uint64_t>(rows[i]);
      std::copy_n(held.data() + (halo ? shared_at_[row] : row) * dim, dim, out.data() + i * dim);
    }
    return Status();
  }
  return updater_->tables()->gather(table, rows, base::DataType::kF32, out.data(), /*keep=*/false);
}

Status Epochs::write(size_t table, std::span<const Vertex> vertices,
                     std::span<const float> values) {
  const uint64_t dim = plan_.tables[table].dim;
  const std::vector<int64_t> rows = rows_of(vertices);
  if (std::vector<float>& held = in_memory_[table]; !held.empty()) {
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(values.begin() + static_cast<int64_t>(i * dim), dim,
                  held.begin() + rows[i] * static_cast<int64_t>(dim));
    }
    return Status();
  }
  if (std::vector<float>& held = halos_[table]; !held.empty()) {
    for (size_t i = 0; i < rows.size(); ++i) {
      const uint32_t at = shared_at_[static_cast<size_t>(rows[i])];
      if (at != kElsewhere) std::copy_n(values.data() + i * dim, dim, held.data() + at * dim);
    }
  }
  return updater_->tables()->put(table, rows, values);
}

Status Epochs::put(size_t table, const Part& part, std::span<const float> values) {
  if (!in_memory_[table].empty()) return write(table, part.vertices, values);
  results_.push_back({table, &part, {values.begin(), values.end()}});
  return Status();
}

Status Epochs::hand_on(size_t layer, const Part& part, const LayerPass::InputGradient& gradient) {
  if (layer == 0) return Status();
  if (plan_.own) SI_RETURN_IF_ERROR(put(plan_.gradients(layer, false), part, gradient.own));
  if (!plan_.neighbours) return Status();
  return put(plan_.gradients(layer, true), part, gradient.to_neighbours);
}

Status Epochs::put_and_gather(size_t step, std::vector<Results> results, const Part* part,
                              Gathered& gathered) {
  for (const auto& [table, of, values] : results) {
    SI_RETURN_IF_ERROR(write(table, of->vertices, values));
  }
  results.clear();
  if (part == nullptr) return Status();
  const std::vector<EpochPlan::Wanted> wanted = plan_.wanted(step);
  gathered.resize(wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto [table, with_halo] = wanted[i];
    const uint64_t dim = plan_.tables[table].dim;
    gathered[i].resize((with_halo ? part->rows() : part->count()) * dim);
    const std::span rows(gathered[i]);
    const auto own = rows.first(part->count() * dim);
    SI_RETURN_IF_ERROR(read(table, part->vertices, own));
    if (!with_halo) continue;
    SI_RETURN_IF_ERROR(read(table, part->halo, rows.subspan(own.size()), /*halo=*/true));
  }
  return Status();
}

template <typename Compute>
Status Epochs::over_parts(size_t step, EpochReport& report, const Compute& compute) {
  std::vector<const Part*> parts;
  for (const Part& part : plan_.parts) {
    if (part.ring <= plan_.steps[step].out) parts.push_back(&part);
  }
  parts.push_back(nullptr);
  const auto start = [&](size_t p) {
    return std::async(std::launch::async,
                      [this, step, part = parts[p], &gathered = gathered_[p % 2],
                       results = std::exchange(results_, {})]() mutable {
                        return put_and_gather(step, std::move(results), part, gathered);
                      });
  };
  std::future<Status> next = start(0);
  for (size_t p = 0; p < parts.size(); ++p) {
    uint64_t begin_ns = base::now_ns();
    SI_RETURN_IF_ERROR(next.get());
    report.row_seconds += base::seconds_since(begin_ns);
    if (parts[p] == nullptr) break;
    next = start(p + 1);
    begin_ns = base::now_ns();
    SI_RETURN_IF_ERROR(compute(*parts[p], gathered_[p % 2]));
    report.compute_seconds += base::seconds_since(begin_ns);
  }
  for (const auto& [table, of, values] : std::exchange(results_, {})) {
    SI_RETURN_IF_ERROR(write(table, of->vertices, values));
  }
  return Status();
}

Status Epochs::pass(bool trains, EpochReport& sum) {
  EpochReport report;
  const uint64_t begin_ns = base::now_ns();
  const engine::UpdaterTraffic before = updater_->traffic();
  std::vector<double> block_losses;
  std::array<uint64_t, 6>& counts = report.counts;
  const auto scale =
      static_cast<float>(1.0 / static_cast<double>(std::max<uint64_t>(1, plan_.trained)));
  const auto count_right = [&](const Part& part, const LayerPass::Outcome& outcome) {
    if (part.ring > 0) return;
    block_losses.insert(block_losses.end(), outcome.block_losses.begin(),
                        outcome.block_losses.end());
    for (size_t i = 0; i < part.count(); ++i) {
      const Vertex v = part.vertices[i];
      const auto split = static_cast<size_t>(graph_.split[v]);
      if (split > 2) continue;
      ++counts[3 + split];
      counts[split] += static_cast<int32_t>(outcome.predicted[i]) == graph_.labels[v];
    }
  };
  const size_t steps = trains ? plan_.steps.size() : plan_.layers();
  for (size_t s = 0; s < steps; ++s) {
    const size_t l = plan_.layer_of(s);
    const Layer& layer = layers_[l];
    SI_RETURN_IF_ERROR(exchange_.rows(
        s, [&](auto... rows) { return read(rows...); },
        [&](auto... rows) { return write(rows...); }, report));
    // Of rings for which a sample's layer is not computed.
    for (const Part& part : plan_.parts) {
      if (!trains || !plan_.sample || !plan_.backward(s) || part.ring <= plan_.steps[s].out)
        continue;
      std::vector<float> zeros(part.count() * layer.in);
      SI_RETURN_IF_ERROR(hand_on(l, part, {zeros, zeros}));
    }
    SI_RETURN_IF_ERROR(over_parts(s, report, [&](const Part& part, const Gathered& rows) -> Status {
      const std::span<float> values = layer_pass_->forward(layer, part, rows[0]);
      if (!plan_.backward(s)) return put(l + 1, part, values);
      std::span<const float> gradient = values;
      if (plan_.forward(s)) {
        count_right(part, layer_pass_->loss(part, trained_, scale, values));
        if (!trains) return Status();
      } else {
        const std::vector<float> none;
        gradient = layer_pass_->collect(layers_[l + 1], part, plan_.own ? rows[1] : none,
                                        plan_.neighbours ? rows.back() : none);
      }
      return hand_on(l, part, layer_pass_->backward(layer, part, gradient, sums_[l], l > 0));
    }));
  }
  SI_RETURN_IF_ERROR(exchange_.sum_report(block_losses, report));
  const engine::UpdaterTraffic moved = updater_->traffic().since(before);
  report.up_bytes = moved.host_link.up_total();
  report.down_bytes = moved.host_link.down_total();
  report.planned_up_bytes = plan_.up_bytes;
  report.planned_down_bytes = plan_.down_bytes;
  report.row_bytes = plan_.row_bytes;
  report.seconds = base::seconds_since(begin_ns);
  sum.add(report);
  return Status();
}

EpochReport Epochs::finished(EpochReport report) const {
  report.epoch = done();
  report.loss /= static_cast<double>(graph_.train_count);
  for (size_t i = 0; i < 3; ++i) {
    report.accuracy[i] = static_cast<double>(report.counts[i]) /
                         static_cast<double>(std::max<uint64_t>(1, report.counts[3 + i]));
  }
  return report;
}

Status Epochs::update() {
  std::vector<float> gradient;
  for (BlockSums& sums : sums_) {
    const std::vector<float> of_layer = sums.total();
    gradient.insert(gradient.end(), of_layer.begin(), of_layer.end());
  }
  SI_RETURN_IF_ERROR(updater_->begin_step());
  SI_RETURN_IF_ERROR(
      updater_->put_gradient(0, gradient.data(), base::DataType::kF32, parameter_count_));
  SI_RETURN_IF_ERROR(updater_->skip_gradient(parameter_count_, space_.count() - parameter_count_));
  SI_ASSIGN_OR_RETURN(const engine::GradientSummary summary, updater_->finish_gradients(1));
  if (!std::isfinite(summary.norm)) {
    (void)updater_->abort();
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("the gradient of epoch {} is not finite", done() + 1),
                  "Take a smaller --lr, or scale the features.");
  }
  engine::UpdateOptions options;
  options.groups = {{.lr = options_.lr}, {.lr = 0, .skip = true}};
  SI_RETURN_IF_ERROR(
      updater_->start_update(options, base::DataType::kF32, [&](uint64_t first) -> void* {
        return first < parameter_count_ ? parameters_.data() + first : nullptr;
      }));
  const uint64_t batches = options_.ranks.batches;
  nlohmann::json record{{"run", identity_}, {"epoch", (done_ + 1) / batches}};
  if (const uint64_t batch = (done_ + 1) % batches; batch > 0) {
    record.update({{"batch", batch}, {"loss", current_.loss}, {"counts", current_.counts}});
  }
  SI_RETURN_IF_ERROR(updater_->commit(record.dump()));
  ++done_;
  return Status();
}

Result<EpochReport> Epochs::train() {
  const uint32_t batches = options_.ranks.batches;
  do {
    take(static_cast<uint32_t>(done_ % batches));
    SI_RETURN_IF_ERROR(pass(true, current_));
    const uint64_t begin_ns = base::now_ns();
    SI_RETURN_IF_ERROR(exchange_.gradients(layers_, sums_));
    SI_RETURN_IF_ERROR(share_parameters(first_rank() ? update() : Status()));
    current_.seconds += base::seconds_since(begin_ns);
  } while (done_ % batches != 0);
  return finished(std::exchange(current_, {}));
}

Result<EpochReport> Epochs::evaluate() {
  EpochReport report;
  for (uint32_t batch = 0; batch < options_.ranks.batches; ++batch) {
    take(batch);
    SI_RETURN_IF_ERROR(pass(false, report));
  }
  return finished(report);
}

Status Epochs::write_parameters(const std::string& path) const {
  if (!first_rank()) return Status();
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
