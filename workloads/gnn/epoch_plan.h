// What an epoch of a rank holds in memory, gathers, puts and hands to others, counted before it
// begins. An epoch has 2 * layers - 1 steps: through the layers forward, the last of which goes
// backward at once, then backward from the layer before it to the first. Before each step ranks
// hand each other rows of neighbours (graph/shares.h says which).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/graph/shares.h"

#include "workloads/gnn/graph_folder.h"
#include "workloads/gnn/layers.h"

namespace smartinf::workloads {

/// This process among those that train one graph.
struct RankOptions {
  uint32_t rank = 0, ranks = 1, servers = 1;
  uint32_t preload = 1;                     // propagations that need nothing of other servers
  std::optional<graph::Sampling> sampling;  // each server trains on a sample, without others' rows
  /// Of a sampled epoch: each server's blocks in so many pieces, each with a sample of its own,
  /// that its ranks compute together, and with an update.
  uint32_t batches = 1;
  std::shared_ptr<engine::Collectives> collectives;  // null: alone
};

struct EpochOptions {
  ModelOptions model;
  std::vector<std::string> devices;  // of several ranks each has a directory rank.N in all of them
  RankOptions ranks;
  std::string start;  // safetensors file of the parameters that a run begins with; empty: drawn
  uint64_t memory_bytes = uint64_t{1} << 30;
  uint64_t keep_bytes = ~uint64_t{0};  // of tables in memory; at most a quarter of it
  uint32_t parts = 0;                  // 0: as few as fit
  uint32_t threads = 0;                // 0: the cores
  double lr = 0.01;
  uint64_t seed = 1;
  bool create = true;
};

/// What an epoch of a rank, or a batch of it, holds in memory and moves.
struct EpochPlan {
  graph::Spread spread;
  std::vector<graph::Propagation> steps;
  std::optional<graph::Csr> sample;  // of the server
  /// Vertices that rows of the tables are of: those that are computed, by ring, then those that are
  /// only read. Of batches those of all, which are in the first batch's plan alone.
  std::vector<graph::Vertex> vertices;
  size_t features = 0;  // how many of them have features that do not come anew in each epoch
  struct Exchange {
    std::vector<std::vector<graph::Vertex>> send, receive;  // [ranks]
  };
  std::vector<Exchange> exchanges;  // [steps]
  std::vector<Part> parts;
  std::vector<graph::Vertex> shared;  // all parts' halos, like `vertices`
  uint64_t trained = 0;               // vertices that all ranks train with
  struct Table {
    std::string name;
    uint32_t dim = 0;
    bool in_memory = false;
    bool halo_in_memory = false;  // rows that parts need of each other, as well as on devices
  };
  /// Features, then the activations between layers, then gradients of these, in up to two sets that
  /// take turns: `own` and `to_neighbours` of LayerPass::InputGradient, as far as the model has
  /// both.
  std::vector<Table> tables;
  bool own = true, neighbours = true;  // that the model has
  uint64_t part_bytes = 0;             // of the largest part, while the next one is gathered
  uint64_t rows_gathered = 0;          // of an epoch, from devices
  uint64_t rows_put = 0;               // to them
  uint64_t up_bytes = 0;               // over the devices' links: rows
  uint64_t down_bytes = 0;             // rows and their numbers
  uint64_t row_bytes = 0;              // gathered and put, in memory as well
  uint64_t within_bytes = 0;           // that this rank sends to ranks of its server
  uint64_t between_bytes = 0;          // and to those of others
  uint64_t table_memory_bytes = 0;     // of the devices' tables

  size_t layers() const { return (steps.size() + 1) / 2; }
  size_t layer_of(size_t step) const { return std::min(step, steps.size() - 1 - step); }
  bool forward(size_t step) const { return step < layers(); }
  bool backward(size_t step) const { return step + 1 >= layers(); }
  /// One of the two tables of gradients that a layer puts for the one before it.
  size_t gradients(size_t layer, bool to_neighbours) const;
  /// The table that a step takes neighbours' rows from.
  size_t handed(size_t step) const {
    return forward(step) ? step : gradients(layer_of(step) + 1, true);
  }
  /// Rows that a step computes a part from.
  struct Wanted {
    size_t table = 0;
    bool with_halo = true;
  };
  std::vector<Wanted> wanted(size_t step) const;
  bool within_server(uint32_t a, uint32_t b) const {
    return spread.server_of(a) == spread.server_of(b);
  }
};

/// memory_bytes: half of it is for parts, a quarter for tables, which stay in memory as far as they
/// fit, features first, then halos of those that do not, and the rest is the devices'. Errors:
/// kOutOfMemory, a block with its neighbours does not fit: with what is needed and given;
/// kInvalidArgument, more parts or ranks than blocks, and what ranks cannot be shared out among.
/// Returns [batches].
base::Result<std::vector<EpochPlan>> plan_epoch(const Graph& graph, std::span<const Layer> layers,
                                                const EpochOptions& options);

/// Counted for each number of preloaded hops whose parts fit in memory, 0 first. Errors: as above.
base::Result<std::vector<graph::PreloadCost>> preload_costs(const Graph& graph,
                                                            std::span<const Layer> layers,
                                                            const EpochOptions& options);

}  // namespace smartinf::workloads
