#include "workloads/gnn/epoch_plan.h"

#include <array>
#include <iterator>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/graph/neighbourhood.h"

namespace smartinf::workloads {

using base::ErrorCode;
using base::Result;
using base::Status;
using graph::Vertex;

namespace {

std::vector<EpochPlan::Table> tables_of(std::span<const Layer> layers) {
  std::vector<EpochPlan::Table> tables{{"features", layers[0].in, false}};
  for (size_t l = 1; l < layers.size(); ++l) {
    tables.push_back({fmt::format("activations.{}", l), layers[l].in, false});
  }
  const size_t sets = std::min<size_t>(2, layers.size() - 1);
  for (size_t set = 0; set < sets; ++set) {
    for (const char* part : {"own", "neighbours"}) {
      tables.push_back({fmt::format("gradients.{}.{}", set, part), layers[1].in, false});
    }
  }
  return tables;
}

/// The part of a graph's blocks that a rank has, or of a batch of its server's.
std::pair<size_t, size_t> blocks_of(const Graph& graph, const RankOptions& ranks, uint32_t rank,
                                    uint32_t batch) {
  const size_t blocks = graph.blocks.size() - 1;
  if (ranks.batches == 1) return {blocks * rank / ranks.ranks, blocks * (rank + 1) / ranks.ranks};
  const uint32_t of_server = ranks.ranks / ranks.servers;
  const size_t server = rank / of_server;
  const size_t first = blocks * server / ranks.servers;
  const size_t all = blocks * (server + 1) / ranks.servers - first;
  const size_t begin = all * batch / ranks.batches;
  const size_t has = all * (batch + 1) / ranks.batches - begin;
  const size_t place = rank % of_server;
  return {first + begin + has * place / of_server, first + begin + has * (place + 1) / of_server};
}

uint64_t largest_block(const Graph& graph) {
  uint64_t most = 1;
  for (size_t b = 0; b + 1 < graph.blocks.size(); ++b) {
    most = std::max<uint64_t>(most, graph.blocks[b + 1] - graph.blocks[b]);
  }
  return most;
}

/// Of a batch ranks of other servers have nothing.
Result<graph::Spread> spread_of(const Graph& graph, const RankOptions& ranks, uint32_t batch) {
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
  const uint32_t of_server = ranks.ranks / ranks.servers;
  if (ranks.batches > 1 && !ranks.sampling) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} batches without samples", ranks.batches),
                  "Give --sample, with as many hops as there are layers, and a high --fanout for "
                  "all neighbours.");
  }
  if (const uint64_t least = uint64_t{ranks.batches} * of_server, has = blocks / ranks.servers;
      ranks.batches > 1 && least > has) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} batches for {} ranks of a server, which has {} blocks",
                              ranks.batches, of_server, has),
                  "Take fewer batches, or partition the graph into smaller blocks.");
  }
  const uint32_t first = ranks.batches == 1 ? 0 : ranks.rank / of_server * of_server;
  const uint32_t end = ranks.batches == 1 ? ranks.ranks : first + of_server;
  graph::Spread spread{.bounds = {graph.blocks[blocks_of(graph, ranks, first, batch).first]},
                       .servers = ranks.servers};
  for (uint32_t r = 0; r < ranks.ranks; ++r) {
    spread.bounds.push_back(r >= first && r < end
                                ? graph.blocks[blocks_of(graph, ranks, r, batch).second]
                                : spread.bounds.back());
  }
  return spread;
}

/// A rank's blocks, and its pieces of the rings around its server, in about `count` parts for as
/// many vertices as the blocks have.
std::vector<Part> make_parts(const Graph& graph, const RankOptions& ranks, uint32_t batch,
                             const graph::Csr& csr, const graph::ServerShare& share,
                             uint32_t count) {
  const auto [first_block, end_block] = blocks_of(graph, ranks, ranks.rank, batch);
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

/// copies: of rows that are gathered, at once.
uint64_t bytes_of(std::span<const Part> parts, std::span<const Layer> layers, uint64_t copies) {
  uint64_t most = 0;
  uint64_t put = 0;  // of a vertex: what a layer hands on
  for (size_t l = 1; l < layers.size(); ++l) put = std::max(put, uint64_t{2} * layers[l].in);
  for (const Part& part : parts) {
    uint64_t gathered = 0;  // of a pass backward: what the layer begins with, and two gradients
    for (size_t l = 0; l < layers.size(); ++l) {
      const uint64_t out = l + 1 < layers.size() ? layers[l].out : 0;
      gathered = std::max(gathered, part.rows() * (layers[l].in + out) + part.count() * out);
    }
    // And results of the part before.
    const uint64_t floats =
        copies * gathered + part.count() * (LayerPass::floats_of_vertex(layers) + put);
    most = std::max(most, floats * sizeof(float));
  }
  return most;
}

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

/// Who computes what, and what ranks lack before each step: [steps][by][of].
struct Shares {
  std::vector<graph::ServerShare> servers;
  std::vector<std::vector<std::vector<std::vector<Vertex>>>> lacking;
};

/// server: whose ranks are planned, with no more of the others than that needs; none: all.
Shares make_shares(const Graph& graph, const graph::Csr& csr, const graph::Spread& spread,
                   std::span<const Layer> layers, const RankOptions& ranks,
                   std::optional<uint32_t> server) {
  Shares shares;
  const uint64_t piece = largest_block(graph);
  for (uint32_t s = 0; s < spread.servers; ++s) {
    const uint32_t rings = s == server.value_or(s) ? rings_of(layers, ranks) : 0;
    shares.servers.emplace_back(csr, spread, s, rings, piece);
  }
  const std::vector<graph::Propagation> steps = steps_of(layers, ranks);
  for (size_t s = 0; s < steps.size(); ++s) {
    const auto same = std::ranges::find(steps, steps[s]) - steps.begin();
    if (static_cast<size_t>(same) < s) {
      shares.lacking.push_back(shares.lacking[static_cast<size_t>(same)]);
      continue;
    }
    auto& lacking = shares.lacking.emplace_back(spread.ranks(),
                                                std::vector<std::vector<Vertex>>(spread.ranks()));
    for (uint32_t r = 0; r < spread.ranks() && layers[0].neighbours(); ++r) {
      const uint32_t of = spread.server_of(r);
      if (of != server.value_or(of) && !steps[s].between) continue;
      lacking[r] = shares.servers[of].lacking(r, steps[s]);
    }
  }
  return shares;
}

/// Calls reads(step, table, rows, halo) and writes(step, table, rows) for all rows that an epoch
/// moves.
template <typename Reads, typename Writes>
void for_rows(const EpochPlan& plan, bool sampled, const Reads& reads, const Writes& writes) {
  for (size_t s = 0; s < plan.steps.size(); ++s) {
    const size_t l = plan.layer_of(s);
    const EpochPlan::Exchange& handed = plan.exchanges[s];
    for (const auto& rows : handed.send) reads(s, plan.handed(s), rows.size());
    for (const auto& rows : handed.receive) writes(s, plan.handed(s), rows.size());
    for (const Part& part : plan.parts) {
      const bool computed = part.ring <= plan.steps[s].out;
      for (const auto& [table, with_halo] : plan.wanted(s)) {
        if (computed) reads(s, table, part.count());
        if (computed && with_halo) reads(s, table, part.halo.size(), /*halo=*/true);
      }
      if (!plan.backward(s)) {
        if (computed) writes(s, l + 1, part.count());
        continue;
      }
      // A sample puts zeros for the rings that it leaves out backward.
      if (l == 0 || !(computed || sampled)) continue;
      if (plan.own) writes(s, plan.gradients(l, false), part.count());
      if (plan.neighbours) writes(s, plan.gradients(l, true), part.count());
    }
  }
}

/// Plans a rank of the spread, all but its tables; csr: the graph's, or the server's sample.
Result<EpochPlan> plan_parts(const Graph& graph, const graph::Csr& csr,
                             std::span<const Layer> layers, const EpochOptions& options,
                             uint32_t batch, const graph::Spread& spread, Shares& shares) {
  const RankOptions& ranks = options.ranks;
  EpochPlan plan;
  plan.spread = spread;
  plan.steps = steps_of(layers, ranks);
  plan.own = layers[0].model != Model::kGcn;
  plan.neighbours = layers[0].neighbours();
  graph::ServerShare& share = shares.servers[spread.server_of(ranks.rank)];
  const std::span<const Vertex> computed = share.computed(ranks.rank, ~uint32_t{0});
  plan.vertices.assign(computed.begin(), computed.end());
  const std::vector<Vertex> read_only = share.read_only(ranks.rank);
  if (plan.neighbours) {
    plan.vertices.insert(plan.vertices.end(), read_only.begin(), read_only.end());
  }
  const bool all_features = ranks.ranks == 1 || plan.steps[0].preloaded;
  plan.features = all_features ? plan.vertices.size() : computed.size();
  for (const auto& lacking : shares.lacking) {
    EpochPlan::Exchange& exchange = plan.exchanges.emplace_back();
    for (const auto& of_rank : lacking) exchange.send.push_back(of_rank[ranks.rank]);
    exchange.receive = lacking[ranks.rank];
  }

  const uint64_t room = options.memory_bytes / 2;
  const auto [first_block, end_block] = blocks_of(graph, ranks, ranks.rank, batch);
  const auto blocks = static_cast<uint32_t>(end_block - first_block);
  if (options.parts > blocks) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} parts, and {} has {} blocks", options.parts,
                              ranks.ranks == 1 ? "the graph" : "a rank", blocks),
                  "Take fewer parts, or partition the graph into smaller blocks.");
  }
  // In use, for the next part, and on the way where rows come in another order than they are taken.
  const uint64_t copies = options.devices.size() > 1 || ranks.ranks > 1 ? 3 : 2;
  const auto fits = [&](uint32_t count) {
    plan.parts = make_parts(graph, ranks, batch, csr, share, count);
    plan.part_bytes = bytes_of(plan.parts, layers, copies);
    return plan.part_bytes <= room;
  };
  uint32_t count = std::max(1u, options.parts);
  uint32_t few = count - 1;  // too few
  for (; !fits(count); count = std::min(2 * count, blocks)) {
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
    few = count;
  }
  while (few + 1 < count) {
    const uint32_t between = (few + count) / 2;
    (fits(between) ? count : few) = between;
  }
  (void)fits(count);
  for (uint32_t r = 0; r < ranks.ranks; ++r) {
    const auto [first, end] = blocks_of(graph, ranks, r, batch);
    for (Vertex v = graph.blocks[first]; v < graph.blocks[end]; ++v) {
      plan.trained += graph.split[v] == Split::kTrain;
    }
  }
  return plan;
}

/// What a rank's batches have in common, and what each of them moves.
void plan_tables(const Graph& graph, std::span<const Layer> layers, const EpochOptions& options,
                 std::span<EpochPlan> batches) {
  const RankOptions& ranks = options.ranks;
  EpochPlan& plan = batches[0];
  if (batches.size() > 1) {
    std::vector<bool> used(graph.csr.vertices());
    for (EpochPlan& batch : batches) {
      for (const Vertex v : std::exchange(batch.vertices, {})) used[v] = true;
      batch.features = 0;
    }
    for (Vertex v = 0; v < graph.csr.vertices(); ++v) {
      if (used[v]) plan.vertices.push_back(v);
    }
    plan.features = plan.vertices.size();
  }
  plan.tables = tables_of(layers);
  uint64_t left = std::min(options.keep_bytes, options.memory_bytes / 4);
  for (EpochPlan::Table& table : plan.tables) {
    const uint64_t bytes = plan.vertices.size() * table.dim * sizeof(float);
    table.in_memory = bytes <= left;
    if (table.in_memory) left -= bytes;
  }
  std::vector<bool> shared(graph.csr.vertices());
  for (const EpochPlan& batch : batches) {
    for (const Part& part : batch.parts) {
      for (const Vertex v : part.halo) shared[v] = true;
    }
  }
  std::ranges::copy_if(plan.vertices, std::back_inserter(plan.shared),
                       [&](Vertex v) { return shared[v]; });
  // Devices cache features.
  for (size_t s = 1; s < plan.steps.size() && !plan.shared.empty(); ++s) {
    EpochPlan::Table& table = plan.tables[plan.handed(s)];
    const uint64_t bytes = plan.shared.size() * table.dim * sizeof(float);
    if (table.in_memory || table.halo_in_memory || bytes > left) continue;
    table.halo_in_memory = true;
    left -= bytes;
  }
  plan.table_memory_bytes = options.memory_bytes / 4 + left;
  for (EpochPlan& batch : batches) {
    batch.tables = plan.tables;
    const auto moves = [&](size_t number, uint64_t rows, bool up, bool halo) {
      const EpochPlan::Table& table = batch.tables[number];
      const uint64_t bytes = rows * table.dim * sizeof(float);
      batch.row_bytes += bytes;
      if (table.in_memory || (halo && table.halo_in_memory)) return;
      (up ? batch.rows_gathered : batch.rows_put) += rows;
      (up ? batch.up_bytes : batch.down_bytes) += bytes;
      batch.down_bytes += rows * sizeof(uint32_t);
    };
    for_rows(
        batch, ranks.sampling.has_value(),
        [&](size_t, size_t table, uint64_t rows, bool halo = false) {
          moves(table, rows, true, halo);
        },
        [&](size_t, size_t table, uint64_t rows) { moves(table, rows, false, false); });
    for (size_t s = 0; s < batch.steps.size(); ++s) {
      for (uint32_t to = 0; to < ranks.ranks; ++to) {
        (batch.within_server(to, ranks.rank) ? batch.within_bytes : batch.between_bytes) +=
            batch.exchanges[s].send[to].size() * batch.tables[batch.handed(s)].dim * sizeof(float);
      }
    }
  }
}

/// Multiplications of a layer for so many vertices with so many edges.
double multiplications(const EpochPlan& plan, std::span<const Layer> layers, size_t step,
                       double vertices, double edges) {
  const Layer& layer = layers[plan.layer_of(step)];
  const double product = vertices * layer.width() * layer.out;
  double work = product + edges * layer.in;  // forward, or forward again
  if (plan.backward(step)) work += (plan.layer_of(step) > 0 ? 2 : 1) * product;
  if (!plan.forward(step)) work += edges * layer.out;  // the gradient is collected
  return work;
}

}  // namespace

size_t EpochPlan::gradients(size_t layer, bool to_neighbours) const {
  const size_t sets = (tables.size() - layers()) / 2;
  return layers() + layer % sets * 2 + (to_neighbours ? 1 : 0);
}

std::vector<EpochPlan::Wanted> EpochPlan::wanted(size_t step) const {
  const size_t l = layer_of(step);
  std::vector<Wanted> wanted{{l, neighbours}};
  if (!forward(step) && own) wanted.push_back({gradients(l + 1, false), false});
  if (!forward(step) && neighbours) wanted.push_back({gradients(l + 1, true), true});
  return wanted;
}

Result<std::vector<EpochPlan>> plan_epoch(const Graph& graph, std::span<const Layer> layers,
                                          const EpochOptions& options) {
  const RankOptions& ranks = options.ranks;
  const uint32_t most = 2 * static_cast<uint32_t>(layers.size()) - 1;
  if (ranks.preload > most) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} hops to preload, and {} layers take in neighbours {} times, "
                              "forward and backward",
                              ranks.preload, layers.size(), most),
                  fmt::format("Take --preload {} or less.", most));
  }
  std::vector<EpochPlan> batches;
  for (uint32_t batch = 0; batch < ranks.batches; ++batch) {
    SI_ASSIGN_OR_RETURN(const graph::Spread spread, spread_of(graph, ranks, batch));
    const uint32_t server = spread.server_of(ranks.rank);
    std::optional<graph::Csr> sample;
    if (ranks.sampling) sample = graph::sampled_graph(graph.csr, spread, server, *ranks.sampling);
    const graph::Csr& csr = sample ? *sample : graph.csr;
    Shares shares = make_shares(graph, csr, spread, layers, ranks, server);
    SI_ASSIGN_OR_RETURN(EpochPlan plan,
                        plan_parts(graph, csr, layers, options, batch, spread, shares));
    plan.sample = std::move(sample);
    batches.push_back(std::move(plan));
  }
  plan_tables(graph, layers, options, batches);
  return batches;
}

Result<std::vector<graph::PreloadCost>> preload_costs(const Graph& graph,
                                                      std::span<const Layer> layers,
                                                      const EpochOptions& options) {
  SI_ASSIGN_OR_RETURN(const graph::Spread spread, spread_of(graph, options.ranks, 0));
  std::vector<graph::PreloadCost> costs;
  Status unfit;
  for (uint32_t hops = 0; hops < 2 * layers.size(); ++hops) {
    EpochOptions with = options;
    with.ranks.preload = hops;
    with.ranks.sampling.reset();
    Shares shares = make_shares(graph, graph.csr, spread, layers, with.ranks, std::nullopt);
    graph::PreloadCost cost{.hops = hops};
    // By step: of the rank with the most, and bytes sent and received, by rank and by server.
    const size_t steps = 2 * layers.size() - 1;
    std::vector<double> work(steps);
    std::vector<uint64_t> rows(steps);
    using Moved = std::vector<std::array<uint64_t, 2>>;
    std::vector<Moved> within(steps, Moved(spread.ranks())), between(steps, Moved(spread.servers));
    double all = 0;
    bool fits = true;
    for (uint32_t r = 0; r < spread.ranks() && fits; ++r) {
      with.ranks.rank = r;
      Result<EpochPlan> planned = plan_parts(graph, graph.csr, layers, with, 0, spread, shares);
      fits = planned.ok();
      if (!fits) {
        unfit = planned.status();
        if (unfit.code() != ErrorCode::kOutOfMemory) return unfit;
        break;
      }
      plan_tables(graph, layers, with, std::span(&*planned, 1));
      const EpochPlan& plan = *planned;
      std::vector<uint64_t> rows_here(steps);
      const auto moves = [&](size_t step, size_t table, uint64_t count, bool /*halo*/ = false) {
        rows_here[step] += count * plan.tables[table].dim * sizeof(float);
      };
      for_rows(plan, false, moves, moves);
      std::vector<double> edges;  // by part
      for (const Part& part : plan.parts) {
        edges.push_back(0);
        for (const Vertex v : part.vertices)
          edges.back() += static_cast<double>(graph.csr.degree(v));
      }
      for (size_t s = 0; s < steps; ++s) {
        double work_here = 0;
        for (size_t p = 0; p < plan.parts.size(); ++p) {
          if (plan.parts[p].ring > plan.steps[s].out) continue;
          work_here += multiplications(plan, layers, s, static_cast<double>(plan.parts[p].count()),
                                       edges[p]);
        }
        work[s] = std::max(work[s], work_here);
        rows[s] = std::max(rows[s], rows_here[s]);
        for (uint32_t to = 0; to < spread.ranks(); ++to) {
          const uint64_t bytes =
              plan.exchanges[s].send[to].size() * plan.tables[plan.handed(s)].dim * sizeof(float);
          const bool near = plan.within_server(to, r);
          (near ? within[s][r] : between[s][spread.server_of(r)])[0] += bytes;
          (near ? within[s][to] : between[s][spread.server_of(to)])[1] += bytes;
        }
        if (r == 0) {
          all += multiplications(plan, layers, s, graph.csr.vertices(),
                                 static_cast<double>(graph.csr.edges()));
        }
      }
      uint64_t room = 0;
      for (const EpochPlan::Table& table : plan.tables) {
        room += plan.vertices.size() * table.dim * sizeof(float);
      }
      cost.room_bytes = std::max(cost.room_bytes, room);
    }
    if (!fits) continue;
    const auto most = [](const Moved& moved) {
      uint64_t bytes = 0;
      for (const auto& [sent, received] : moved) bytes = std::max({bytes, sent, received});
      return bytes;
    };
    for (size_t s = 0; s < steps; ++s) {
      cost.work += work[s] / all;
      cost.row_bytes += rows[s];
      cost.exchanges += most(within[s]) + most(between[s]) > 0;
      cost.within_bytes += most(within[s]);
      cost.between_bytes += most(between[s]);
    }
    costs.push_back(cost);
  }
  if (costs.empty()) return unfit;
  return costs;
}

}  // namespace smartinf::workloads
