#include "workloads/gnn/epochs.h"

#include <algorithm>
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
constexpr uint64_t kExchangeBytes = 8 << 20;  // that a rank sends at once, and receives

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

/// The part of a graph's blocks that a rank has.
std::pair<size_t, size_t> blocks_of(const Graph& graph, uint32_t rank, uint32_t ranks) {
  const size_t blocks = graph.blocks.size() - 1;
  return {blocks * rank / ranks, blocks * (rank + 1) / ranks};
}

uint64_t largest_block(const Graph& graph) {
  uint64_t most = 1;
  for (size_t b = 0; b + 1 < graph.blocks.size(); ++b) {
    most = std::max<uint64_t>(most, graph.blocks[b + 1] - graph.blocks[b]);
  }
  return most;
}

Result<graph::Spread> spread_of(const Graph& graph, const RankOptions& ranks) {
  const size_t blocks = graph.blocks.size() - 1;
  if (ranks.servers == 0 || ranks.ranks % ranks.servers != 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} ranks on {} servers", ranks.ranks, ranks.servers),
                  "Start as many ranks on each server (torchrun does), or give other --servers.");
  }
  if (ranks.ranks > blocks) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} ranks, and the graph has {} blocks", ranks.ranks, blocks),
                  "Take fewer ranks, or partition the graph into smaller blocks.");
  }
  graph::Spread spread{.bounds = {0}, .servers = ranks.servers};
  for (uint32_t r = 0; r < ranks.ranks; ++r) {
    spread.bounds.push_back(graph.blocks[blocks_of(graph, r, ranks.ranks).second]);
  }
  return spread;
}

/// What every rank hands to every other one for a propagation. shares: of all servers.
std::vector<std::vector<std::vector<Vertex>>> all_lacking(std::span<graph::ServerShare> shares,
                                                          const graph::Spread& spread,
                                                          const graph::Propagation& step) {
  std::vector<std::vector<std::vector<Vertex>>> lacking;
  for (uint32_t rank = 0; rank < spread.ranks(); ++rank) {
    lacking.push_back(shares[spread.server_of(rank)].lacking(rank, step));
  }
  return lacking;
}

/// A rank's blocks, and its pieces of the rings around its server, in about `count` parts for as
/// many vertices as the blocks have.
std::vector<Part> make_parts(const Graph& graph, const RankOptions& ranks, const graph::Csr& csr,
                             const graph::ServerShare& share, uint32_t count) {
  const auto [first_block, end_block] = blocks_of(graph, ranks.rank, ranks.ranks);
  const size_t blocks = end_block - first_block;
  std::vector<Part> parts;
  const auto begin = [&](uint32_t ring) { parts.emplace_back().ring = ring; };
  const auto add = [&](std::span<const Vertex> vertices, uint64_t number, bool sums) {
    Part& part = parts.back();
    if (sums) part.blocks.push_back({number, part.count(), vertices.size()});
    part.vertices.insert(part.vertices.end(), vertices.begin(), vertices.end());
  };
  const std::span<const Vertex> computed = share.computed(ranks.rank, ~uint32_t{0});
  for (uint32_t p = 0; p < count; ++p) {
    begin(0);
    for (size_t b = blocks * p / count; b < blocks * (p + 1) / count; ++b) {
      const size_t first = graph.blocks[first_block + b] - graph.blocks[first_block];
      const size_t size = graph.blocks[first_block + b + 1] - graph.blocks[first_block + b];
      add(computed.subspan(first, size), first_block + b, true);
    }
  }
  const size_t of_part = base::divide_up(blocks, count);
  size_t has = 0;
  // Behind all blocks, each server in turn.
  const uint64_t numbers = (uint64_t{ranks.rank / (ranks.ranks / ranks.servers)} + 1) << 32;
  for (const auto& [ring, first, size, number] : share.pieces(ranks.rank)) {
    if (parts.back().ring != ring || has++ == of_part) {
      begin(ring);
      has = 1;
    }
    add(computed.subspan(first, size), numbers + number, ranks.sampling.has_value());
  }
  graph::Neighbourhood around(csr);
  for (Part& part : parts) {
    const graph::HopOrder order = around.within(part.vertices, 1);
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
      gathered = std::max(gathered, part.rows() * (layers[l].in + out) + part.count() * out);
    }
    // Once in use, once for the next part, and once on the way from a device.
    const uint64_t floats = 3 * gathered + part.count() * LayerPass::floats_of_vertex(layers);
    most = std::max(most, floats * sizeof(float));
  }
  return most;
}

/// Of an epoch: the steps of propagations() that go forward are the layers, and those that go
/// backward bring gradients from the layer `l`.
size_t backward_step(size_t layers, size_t l) { return 2 * layers - 1 - l; }

uint32_t rings_of(std::span<const Layer> layers, const RankOptions& ranks) {
  if (!layers[0].neighbours()) return 0;
  return ranks.sampling ? ranks.sampling->hops : std::max(1u, ranks.preload) - 1;
}

std::vector<graph::Propagation> steps_of(std::span<const Layer> layers, const RankOptions& ranks) {
  const auto count = static_cast<uint32_t>(layers.size());
  if (!layers[0].neighbours()) return graph::propagations(count, 1);
  return ranks.sampling ? graph::sampled_propagations(count, ranks.sampling->hops)
                        : graph::propagations(count, ranks.preload);
}

/// Adds vertices, rows and messages of a rank to a plan that has its spread.
Status plan_rank(const Graph& graph, std::span<const Layer> layers, const EpochOptions& options,
                 EpochPlan& plan) {
  const RankOptions& ranks = options.ranks;
  const uint32_t most = 2 * static_cast<uint32_t>(layers.size()) - 1;
  if (ranks.preload > most) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} hops to preload, and {} layers take in neighbours {} times, "
                              "forward and backward",
                              ranks.preload, layers.size(), most),
                  fmt::format("Take --preload {} or less.", most));
  }
  plan.steps = steps_of(layers, ranks);
  const uint32_t server = plan.spread.server_of(ranks.rank);
  if (ranks.sampling) {
    plan.sample = graph::sampled_graph(graph.csr, plan.spread, server, *ranks.sampling);
  }
  const graph::Csr& csr = plan.sample ? *plan.sample : graph.csr;
  const uint64_t piece = largest_block(graph);
  std::vector<graph::ServerShare> shares;
  for (uint32_t s = 0; s < ranks.servers; ++s) {
    shares.emplace_back(csr, plan.spread, s, s == server ? rings_of(layers, ranks) : 0, piece);
  }
  graph::ServerShare& share = shares[server];
  const std::span<const Vertex> computed = share.computed(ranks.rank, ~uint32_t{0});
  plan.vertices.assign(computed.begin(), computed.end());
  const std::vector<Vertex> read_only = share.read_only(ranks.rank);
  if (layers[0].neighbours()) {
    plan.vertices.insert(plan.vertices.end(), read_only.begin(), read_only.end());
  }
  const bool all_features = ranks.ranks == 1 || plan.steps[0].preloaded;
  plan.features = all_features ? plan.vertices.size() : computed.size();

  for (size_t s = 0; s < plan.steps.size(); ++s) {
    const auto same = std::find(plan.steps.begin(), plan.steps.end(), plan.steps[s]);
    EpochPlan::Exchange exchange;
    if (const auto at = static_cast<size_t>(same - plan.steps.begin()); at < s) {
      exchange = plan.exchanges[at];
    } else if (layers[0].neighbours()) {
      for (uint32_t r = 0; r < ranks.ranks; ++r) {
        const uint32_t of = plan.spread.server_of(r);
        exchange.send.emplace_back();
        if (of != server && !plan.steps[s].between) continue;
        std::vector<std::vector<Vertex>> lacking = shares[of].lacking(r, plan.steps[s]);
        exchange.send.back() = lacking[ranks.rank];
        if (r == ranks.rank) exchange.receive = std::move(lacking);
      }
    }
    plan.exchanges.push_back(std::move(exchange));
  }
  const uint64_t room = options.memory_bytes / 2;
  const auto [first_block, end_block] = blocks_of(graph, ranks.rank, ranks.ranks);
  const auto blocks = static_cast<uint32_t>(end_block - first_block);
  if (options.parts > blocks) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} parts, and {} has {} blocks", options.parts,
                              ranks.ranks == 1 ? "the graph" : "a rank", blocks),
                  "Take fewer parts, or partition the graph into smaller blocks.");
  }
  for (uint32_t count = std::max(1u, options.parts);; count = std::min(2 * count, blocks)) {
    plan.parts = make_parts(graph, ranks, csr, share, count);
    plan.part_bytes = bytes_of(plan.parts, layers);
    if (plan.part_bytes <= room) break;
    if (options.parts > 0 || count == blocks) {
      return Status(
          ErrorCode::kOutOfMemory,
          fmt::format("the largest of {} parts takes {} with its neighbours' rows, and half "
                      "of the memory is {}",
                      plan.parts.size(), base::format_bytes(plan.part_bytes),
                      base::format_bytes(room)),
          fmt::format("Allow --memory {}{}.", base::format_bytes(2 * plan.part_bytes),
                      count == blocks ? ", or partition the graph into smaller blocks"
                                      : ", or more --parts"));
    }
  }
  return Status();
}

}  // namespace

Result<EpochPlan> plan_epoch(const Graph& graph, std::span<const Layer> layers,
                             const EpochOptions& options) {
  EpochPlan plan;
  SI_ASSIGN_OR_RETURN(plan.spread, spread_of(graph, options.ranks));
  SI_RETURN_IF_ERROR(plan_rank(graph, layers, options, plan));
  size_t sets = 0;
  plan.tables = tables_of(layers, sets);
  uint64_t left = std::min(options.keep_bytes, options.memory_bytes / 4);
  for (EpochPlan::Table& table : plan.tables) {
    const uint64_t bytes = plan.vertices.size() * table.dim * sizeof(float);
    table.in_memory = bytes <= left;
    if (table.in_memory) left -= bytes;
  }
  plan.table_memory_bytes = options.memory_bytes / 4;
  const auto reads = [&](size_t table, uint64_t rows) {
    if (plan.tables[table].in_memory) return;
    plan.rows_gathered += rows;
    plan.up_bytes += rows * plan.tables[table].dim * sizeof(float);
    plan.down_bytes += rows * sizeof(uint32_t);
  };
  const auto writes = [&](size_t table, uint64_t rows) {
    if (plan.tables[table].in_memory) return;
    plan.rows_put += rows;
    plan.down_bytes += rows * (plan.tables[table].dim * sizeof(float) + sizeof(uint32_t));
  };
  const auto gathers = [&](size_t table, const Part& part, bool with_halo) {
    reads(table, with_halo ? part.rows() : part.count());
  };
  const auto exchanges = [&](size_t step, size_t table) {
    const EpochPlan::Exchange& rows = plan.exchanges[step];
    for (uint32_t r = 0; r < rows.send.size(); ++r) {
      reads(table, rows.send[r].size());
      writes(table, rows.receive[r].size());
      const bool within = plan.spread.server_of(r) == plan.spread.server_of(options.ranks.rank);
      (within ? plan.within_bytes : plan.between_bytes) +=
          rows.send[r].size() * plan.tables[table].dim * sizeof(float);
    }
  };
  const size_t last = layers.size() - 1;
  const bool halo = layers[0].neighbours();
  for (size_t l = 0; l <= last; ++l) {
    exchanges(l, l);
    if (l > 0) exchanges(backward_step(last + 1, l), gradients(plan, last + 1, l, true));
    for (const Part& part : plan.parts) {
      const uint32_t forward = plan.steps[l].out;
      if (part.ring <= forward) gathers(l, part, halo);
      if (part.ring <= forward && l < last) writes(l + 1, part.count());
      const size_t backward = l < last ? backward_step(last + 1, l + 1) : l;
      if (l < last && part.ring <= plan.steps[backward].out) {
        gathers(l, part, halo);
        if (has_own(layers[l])) gathers(gradients(plan, last + 1, l + 1, false), part, false);
        if (halo) gathers(gradients(plan, last + 1, l + 1, true), part, true);
      }
      // A sample puts zeros for the rings that it leaves out backward.
      if (l == 0 || (part.ring > plan.steps[backward].out && !plan.sample)) continue;
      if (has_own(layers[l])) writes(gradients(plan, last + 1, l, false), part.count());
      if (halo) writes(gradients(plan, last + 1, l, true), part.count());
    }
  }
  return plan;
}

Result<std::vector<graph::PreloadCost>> preload_costs(const Graph& graph,
                                                      std::span<const Layer> layers,
                                                      const RankOptions& ranks) {
  SI_ASSIGN_OR_RETURN(const graph::Spread spread, spread_of(graph, ranks));
  const size_t count = layers.size();
  size_t sets = 0;
  uint64_t dims = 0;
  for (const EpochPlan::Table& table : tables_of(layers, sets)) dims += table.dim;
  /// Multiplications of a layer: forward, and backward with forward once more.
  const auto forward = [&](size_t l, uint64_t rows, uint64_t edges) {
    return static_cast<double>(rows) * layers[l].width() * layers[l].out +
           static_cast<double>(edges) * layers[l].in;
  };
  const auto backward = [&](size_t l, uint64_t rows, uint64_t edges) {
    const double again = l + 1 < count ? forward(l, rows, edges) : 0;
    const double collected = l + 1 < count ? static_cast<double>(edges) * layers[l].out : 0;
    return again + collected + 2.0 * static_cast<double>(rows) * layers[l].width() * layers[l].out;
  };
  double all = 0;
  for (size_t l = 0; l < count; ++l) {
    all += forward(l, graph.csr.vertices(), graph.csr.edges());
    all += backward(l, graph.csr.vertices(), graph.csr.edges());
  }
  std::vector<graph::PreloadCost> costs;
  for (uint32_t hops = 0; hops < 2 * count; ++hops) {
    RankOptions with = ranks;
    with.preload = hops;
    with.sampling.reset();
    const std::vector<graph::Propagation> steps = steps_of(layers, with);
    std::vector<graph::ServerShare> shares;
    for (uint32_t s = 0; s < spread.servers; ++s) {
      shares.emplace_back(graph.csr, spread, s, rings_of(layers, with), largest_block(graph));
    }
    graph::PreloadCost& cost = costs.emplace_back();
    cost.hops = hops;
    for (uint32_t r = 0; r < spread.ranks(); ++r) {
      graph::ServerShare& share = shares[spread.server_of(r)];
      const auto edges_of = [&](std::span<const Vertex> vertices) {
        uint64_t edges = 0;
        for (const Vertex v : vertices) edges += graph.csr.degree(v);
        return edges;
      };
      double work = 0;
      for (size_t l = 0; l < count; ++l) {
        const auto of = share.computed(r, steps[l].out);
        work += forward(l, of.size(), edges_of(of));
        const size_t step = l + 1 < count ? backward_step(count, l + 1) : l;
        const auto back = share.computed(r, steps[step].out);
        work += backward(l, back.size(), edges_of(back));
      }
      cost.work = std::max(cost.work, work / all);
      const uint64_t rows = share.computed(r, ~uint32_t{0}).size() + share.read_only(r).size();
      cost.room_bytes = std::max(cost.room_bytes, rows * dims * sizeof(float));
    }
    for (size_t s = 0; s < steps.size() && layers[0].neighbours(); ++s) {
      const uint64_t row = layers[s < count ? s : 2 * count - 1 - s].in * sizeof(float);
      // Sent and received, by rank and by server.
      std::vector<std::array<uint64_t, 2>> within(spread.ranks()), between(spread.servers);
      const auto lacking = all_lacking(shares, spread, steps[s]);
      for (uint32_t to = 0; to < spread.ranks(); ++to) {
        for (uint32_t from = 0; from < spread.ranks(); ++from) {
          const uint64_t bytes = lacking[to][from].size() * row;
          const uint32_t here = spread.server_of(to);
          const uint32_t there = spread.server_of(from);
          (here == there ? within[from] : between[there])[0] += bytes;
          (here == there ? within[to] : between[here])[1] += bytes;
        }
      }
      const auto most = [](const auto& moved) {
        uint64_t bytes = 0;
        for (const auto& [sent, received] : moved) bytes = std::max({bytes, sent, received});
        return bytes;
      };
      cost.within_bytes += most(within);
      cost.between_bytes += most(between);
    }
  }
  return costs;
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
  const RankOptions& ranks = options.ranks;
  if (ranks.ranks == 1) return;
  identity_ += fmt::format(", by {} ranks on {} servers, ", ranks.ranks, ranks.servers);
  if (ranks.sampling) {
    identity_ += fmt::format("on samples of {} hops, {} neighbours and seed {}",
                             ranks.sampling->hops, ranks.sampling->fanout, ranks.sampling->seed);
  } else {
    identity_ += fmt::format("with {} hops preloaded", ranks.preload);
  }
}

Result<std::unique_ptr<Epochs>> Epochs::open(const Graph& graph, const EpochOptions& options) {
  std::unique_ptr<Epochs> made(
      new Epochs(graph, options, layers_of(options.model, graph.feature_count, graph.classes)));
  SI_RETURN_IF_ERROR(made->begin());
  return made;
}

Status Epochs::begin() {
  Result<EpochPlan> plan = plan_epoch(graph_, layers_, options_);
  if (plan.ok()) plan_ = std::move(*plan);
  Status opened = plan.status();
  if (opened.ok()) opened = open_devices();
  if (!alone()) {
    opened =
        engine::all_ok(*options_.ranks.collectives, engine::Channel::kControl, identity_, opened);
  }
  SI_RETURN_IF_ERROR(opened);
  SI_RETURN_IF_ERROR(share_parameters(Status()));
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  layer_pass_ = std::make_unique<LayerPass>(plan_.sample ? *plan_.sample : graph_.csr, parameters_,
                                            options_.threads > 0 ? options_.threads : cores);
  return Status();
}

Status Epochs::open_devices() {
  const auto& bounds = plan_.spread.bounds;
  const uint32_t of_server = plan_.spread.ranks_of_server();
  const uint32_t first = options_.ranks.rank / of_server * of_server;
  for (size_t v = 0; v < graph_.labels.size(); ++v) {
    const bool other = plan_.sample && (v < bounds[first] || v >= bounds[first + of_server]);
    trained_.push_back(graph_.split[v] == Split::kTrain && !other ? graph_.labels[v] : -1);
  }
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
    done_ = record.value("epoch", uint64_t{0});
  }
  in_memory_.resize(plan_.tables.size());
  for (size_t t = 0; t < plan_.tables.size(); ++t) {
    if (!plan_.tables[t].in_memory) continue;
    in_memory_[t].resize(plan_.vertices.size() * plan_.tables[t].dim);
  }
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
  constexpr uint32_t kElsewhere = ~uint32_t{0};
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

Status Epochs::read(size_t table, std::span<const Vertex> vertices, std::span<float> out) {
  const uint64_t dim = plan_.tables[table].dim;
  const std::vector<int64_t> rows = rows_of(vertices);
  if (const std::vector<float>& held = in_memory_[table]; !held.empty()) {
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(held.begin() + rows[i] * static_cast<int64_t>(dim), dim,
                  out.begin() + static_cast<int64_t>(i * dim));
    }
    return Status();
  }
  const std::lock_guard lock(tables_mutex_);
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
  const std::lock_guard lock(tables_mutex_);
  return updater_->tables()->put(table, rows, values);
}

Result<Epochs::Gathered> Epochs::gather(const Part& part, std::span<const Wanted> wanted) {
  Gathered gathered;
  std::vector<Vertex> all = part.vertices;
  all.insert(all.end(), part.halo.begin(), part.halo.end());
  for (const Wanted& want : wanted) {
    const std::span<const Vertex> vertices = want.with_halo ? all : part.vertices;
    std::vector<float>& rows =
        gathered.emplace_back(vertices.size() * plan_.tables[want.table].dim);
    SI_RETURN_IF_ERROR(read(want.table, vertices, rows));
  }
  return gathered;
}

Status Epochs::exchange(size_t step, size_t table, EpochReport& report) {
  const EpochPlan::Exchange& rows = plan_.exchanges[step];
  if (alone() || rows.send.empty()) return Status();
  const uint64_t begin_ns = base::now_ns();
  engine::Collectives& ranks = *options_.ranks.collectives;
  const uint64_t dim = plan_.tables[table].dim;
  const uint64_t at_once =
      std::max<uint64_t>(1, kExchangeBytes / (uint64_t{ranks.world()} * dim * sizeof(float)));
  const auto some = [&](const std::vector<Vertex>& vertices, uint64_t first) {
    first = std::min<uint64_t>(first, vertices.size());
    return std::span(vertices).subspan(first, std::min(at_once, vertices.size() - first));
  };
  for (uint64_t first = 0;; first += at_once) {
    std::vector<std::vector<float>> sent(ranks.world()), received(ranks.world());
    std::vector<std::unique_ptr<engine::Collectives::Pending>> calls;
    for (uint32_t r = 0; r < ranks.world(); ++r) {
      received[r].resize(some(rows.receive[r], first).size() * dim);
      if (received[r].empty()) continue;
      SI_ASSIGN_OR_RETURN(calls.emplace_back(),
                          ranks.receive(engine::Channel::kForward,
                                        std::as_writable_bytes(std::span(received[r])), r));
    }
    for (uint32_t r = 0; r < ranks.world(); ++r) {
      const std::span<const Vertex> vertices = some(rows.send[r], first);
      if (vertices.empty()) continue;
      sent[r].resize(vertices.size() * dim);
      SI_RETURN_IF_ERROR(read(table, vertices, sent[r]));
      const auto bytes = std::as_bytes(std::span(sent[r]));
      SI_ASSIGN_OR_RETURN(calls.emplace_back(), ranks.send(engine::Channel::kForward, bytes, r));
      const bool within = plan_.spread.server_of(r) == plan_.spread.server_of(ranks.rank());
      (within ? report.within_bytes : report.between_bytes) += bytes.size();
    }
    if (calls.empty()) break;
    for (const auto& call : calls) SI_RETURN_IF_ERROR(call->wait());
    for (uint32_t r = 0; r < ranks.world(); ++r) {
      if (!received[r].empty()) {
        SI_RETURN_IF_ERROR(write(table, some(rows.receive[r], first), received[r]));
      }
    }
  }
  report.exchange_seconds += base::seconds_since(begin_ns);
  return Status();
}

template <typename Compute>
Status Epochs::over_parts(uint32_t rings, std::vector<Wanted> wanted, const Compute& compute) {
  std::vector<const Part*> parts;
  for (const Part& part : plan_.parts) {
    if (part.ring <= rings) parts.push_back(&part);
  }
  const auto start = [&](size_t p) {
    return std::async(std::launch::async, [&, p] { return gather(*parts[p], wanted); });
  };
  std::future<Result<Gathered>> next = start(0);
  for (size_t p = 0; p < parts.size(); ++p) {
    const Result<Gathered> rows = next.get();
    SI_RETURN_IF_ERROR(rows.status());
    if (p + 1 < parts.size()) next = start(p + 1);
    SI_RETURN_IF_ERROR(compute(*parts[p], *rows));
  }
  return Status();
}

Result<EpochReport> Epochs::pass(bool trains) {
  EpochReport report;
  report.epoch = done_;
  const uint64_t begin_ns = base::now_ns();
  const engine::UpdaterTraffic before = updater_->traffic();
  std::vector<double> block_losses;
  std::array<uint64_t, 6> counts{};  // right and all of each split
  const size_t last = layers_.size() - 1;
  const bool neighbours = layers_[0].neighbours();
  const auto scale = static_cast<float>(1.0 / static_cast<double>(graph_.train_count));
  /// Hands on what the layer before needs.
  const auto hand_on = [&](size_t l, const Part& part,
                           LayerPass::InputGradient gradient) -> Status {
    if (l == 0) return Status();
    if (has_own(layers_[l])) {
      SI_RETURN_IF_ERROR(write(gradients(plan_, last + 1, l, false), part.vertices, gradient.own));
    }
    if (!neighbours) return Status();
    return write(gradients(plan_, last + 1, l, true), part.vertices, gradient.to_neighbours);
  };
  /// Of rings for which a sample's layer is not computed.
  const auto hand_on_zeros = [&](size_t l) -> Status {
    for (const Part& part : plan_.parts) {
      if (!plan_.sample || l == 0 || part.ring <= plan_.steps[l].out) continue;
      std::vector<float> zeros(part.count() * layers_[l].in);
      SI_RETURN_IF_ERROR(hand_on(l, part, {zeros, zeros}));
    }
    return Status();
  };
  for (size_t l = 0; l <= last; ++l) {
    const Layer& layer = layers_[l];
    SI_RETURN_IF_ERROR(exchange(l, l, report));
    SI_RETURN_IF_ERROR(over_parts(
        plan_.steps[l].out, {{l, neighbours}},
        [&](const Part& part, const Gathered& rows) -> Status {
          const std::span<float> values = layer_pass_->forward(layer, part, rows[0]);
          if (l < last) return write(l + 1, part.vertices, values);
          const LayerPass::Outcome outcome = layer_pass_->loss(part, trained_, scale, values);
          if (part.ring == 0) {
            block_losses.insert(block_losses.end(), outcome.block_losses.begin(),
                                outcome.block_losses.end());
          }
          for (size_t i = 0; part.ring == 0 && i < part.count(); ++i) {
            const Vertex v = part.vertices[i];
            const auto split = static_cast<size_t>(graph_.split[v]);
            if (split > 2) continue;
            ++counts[3 + split];
            counts[split] += static_cast<int32_t>(outcome.predicted[i]) == graph_.labels[v];
          }
          if (!trains) return Status();
          return hand_on(l, part, layer_pass_->backward(layer, part, values, sums_[l], l > 0));
        }));
  }
  if (trains) SI_RETURN_IF_ERROR(hand_on_zeros(last));
  for (size_t l = last; trains && l-- > 0;) {
    const Layer& layer = layers_[l];
    const Layer& above = layers_[l + 1];
    const size_t step = backward_step(last + 1, l + 1);
    const size_t to_neighbours = gradients(plan_, last + 1, l + 1, true);
    std::vector<Wanted> wanted{{l, neighbours}};
    if (has_own(above)) wanted.push_back({gradients(plan_, last + 1, l + 1, false), false});
    if (neighbours) wanted.push_back({to_neighbours, true});
    SI_RETURN_IF_ERROR(exchange(step, to_neighbours, report));
    SI_RETURN_IF_ERROR(
        over_parts(plan_.steps[step].out, wanted, [&](const Part& part, const Gathered& rows) {
          (void)layer_pass_->forward(layer, part, rows[0]);
          const std::vector<float> none;
          const std::span<const float> gradient = layer_pass_->collect(
              above, part, has_own(above) ? rows[1] : none, neighbours ? rows.back() : none);
          return hand_on(l, part, layer_pass_->backward(layer, part, gradient, sums_[l], l > 0));
        }));
    SI_RETURN_IF_ERROR(hand_on_zeros(l));
  }
  SI_RETURN_IF_ERROR(share_report(block_losses, report, counts));
  report.loss /= static_cast<double>(graph_.train_count);
  for (size_t i = 0; i < 3; ++i) {
    report.accuracy[i] =
        static_cast<double>(counts[i]) / static_cast<double>(std::max<uint64_t>(1, counts[3 + i]));
  }
  const engine::UpdaterTraffic moved = updater_->traffic().since(before);
  report.up_bytes = moved.host_link.up_total();
  report.down_bytes = moved.host_link.down_total();
  report.seconds = base::seconds_since(begin_ns);
  return report;
}

Status Epochs::share_report(std::span<const double> block_losses, EpochReport& report,
                            std::array<uint64_t, 6>& counts) {
  report.planned_within_bytes = plan_.within_bytes;
  report.planned_between_bytes = plan_.between_bytes;
  const std::array<uint64_t*, 10> summed{&counts[0],
                                         &counts[1],
                                         &counts[2],
                                         &counts[3],
                                         &counts[4],
                                         &counts[5],
                                         &report.within_bytes,
                                         &report.between_bytes,
                                         &report.planned_within_bytes,
                                         &report.planned_between_bytes};
  std::string mine;
  for (const uint64_t* const count : summed) {
    mine.append(reinterpret_cast<const char*>(count), sizeof *count);
  }
  mine.append(reinterpret_cast<const char*>(block_losses.data()), block_losses.size_bytes());
  std::vector<std::string> all{mine};
  if (!alone()) {
    SI_ASSIGN_OR_RETURN(
        all, engine::all_gather(*options_.ranks.collectives, engine::Channel::kControl, mine));
  }
  for (uint64_t* const count : summed) *count = 0;
  for (const std::string& of_rank : all) {  // in the order of blocks
    const char* at = of_rank.data();
    const auto take = [&](auto& value) {
      std::memcpy(&value, at, sizeof value);
      at += sizeof value;
    };
    uint64_t count = 0;
    for (uint64_t* const sum : summed) take(count), *sum += count;
    for (double loss = 0; at < of_rank.data() + of_rank.size();) take(loss), report.loss += loss;
  }
  return Status();
}

Status Epochs::share_sums() {
  if (alone()) return Status();
  const uint32_t of_server = plan_.spread.ranks_of_server();
  if (options_.ranks.rank != leader()) return send_sums(leader());
  SI_RETURN_IF_ERROR(receive_sums(leader() + 1, leader() + of_server, 1));
  const uint64_t server = leader() / of_server;
  for (BlockSums& sums : sums_) {
    if (plan_.sample) sums.nodes() = {{server, 1, sums.total()}};
  }
  if (!first_rank()) return send_sums(0);
  return receive_sums(of_server, options_.ranks.ranks, of_server);
}

Status Epochs::send_sums(uint32_t to) {
  std::vector<uint64_t> heads;  // of each node its layer, first block and number of blocks
  std::vector<float> values;
  for (size_t l = 0; l < sums_.size(); ++l) {
    for (const BlockSums::Node& node : sums_[l].nodes()) {
      heads.insert(heads.end(), {l, node.first, node.blocks});
      values.insert(values.end(), node.sum.begin(), node.sum.end());
    }
    sums_[l].nodes().clear();
  }
  const std::array<uint64_t, 2> sizes{heads.size(), values.size()};
  SI_RETURN_IF_ERROR(send(std::span<const uint64_t>(sizes), to));
  SI_RETURN_IF_ERROR(send(std::span<const uint64_t>(heads), to));
  return send(std::span<const float>(values), to);
}

Status Epochs::receive_sums(uint32_t first, uint32_t end, uint32_t stride) {
  std::vector<std::vector<BlockSums::Node>> nodes(sums_.size());
  for (size_t l = 0; l < sums_.size(); ++l) nodes[l] = std::move(sums_[l].nodes());
  for (uint32_t from = first; from < end; from += stride) {
    std::array<uint64_t, 2> sizes{};
    SI_RETURN_IF_ERROR(receive(std::span<uint64_t>(sizes), from));
    std::vector<uint64_t> heads(sizes[0]);
    std::vector<float> values(sizes[1]);
    SI_RETURN_IF_ERROR(receive(std::span(heads), from));
    SI_RETURN_IF_ERROR(receive(std::span(values), from));
    auto value = values.begin();
    for (size_t i = 0; i < heads.size(); i += 3) {
      const Layer& layer = layers_[heads[i]];
      const auto behind = value + static_cast<int64_t>(layer.end - layer.weight);
      nodes[heads[i]].push_back({heads[i + 1], heads[i + 2], std::vector<float>(value, behind)});
      value = behind;
    }
  }
  for (size_t l = 0; l < sums_.size(); ++l) {
    sums_[l] = {};
    std::ranges::sort(nodes[l], {}, &BlockSums::Node::first);
    for (BlockSums::Node& node : nodes[l]) sums_[l].add(std::move(node));
  }
  return Status();
}

Status Epochs::share_parameters(const Status& mine) {
  if (alone()) return mine;
  const RankOptions& ranks = options_.ranks;
  SI_RETURN_IF_ERROR(
      engine::all_ok(*ranks.collectives, engine::Channel::kControl, "parameters", mine));
  const std::span<float> parameters = std::span(parameters_).first(parameter_count_);
  if (!first_rank()) {
    const uint32_t from = ranks.rank == leader() ? 0 : leader();
    SI_RETURN_IF_ERROR(receive(std::span(&done_, 1), from));
    SI_RETURN_IF_ERROR(receive(parameters, from));
  }
  const uint32_t of_server = plan_.spread.ranks_of_server();
  for (uint32_t to = ranks.rank + 1; to < ranks.ranks; ++to) {
    const bool mate = ranks.rank == leader() && to < leader() + of_server;
    if (!mate && !(first_rank() && to % of_server == 0)) continue;
    SI_RETURN_IF_ERROR(send(std::span<const uint64_t>(&done_, 1), to));
    SI_RETURN_IF_ERROR(send(std::span<const float>(parameters), to));
  }
  return Status();
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
  SI_RETURN_IF_ERROR(share_sums());
  SI_RETURN_IF_ERROR(share_parameters(first_rank() ? update() : Status()));
  report.epoch = done_;
  report.seconds += base::seconds_since(begin_ns);
  return report;
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
