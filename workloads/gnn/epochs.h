// Training of a graph network over all vertices, layer by layer and part by part: features,
// activations and their gradients are tables of rows on devices, of which a part's rows and those
// of its neighbours are in memory at a time.
//
//   forward    gather (activations of the layer before) -> compute -> put
//   backward   gather (the same, and gradients) -> compute forward again, then backward -> put
//
// Several ranks each do so for vertices of their own, and hand each other rows of neighbours behind
// each layer (graph/shares.h says which). Rank 0 has the parameters.
//
// A vertex collects its gradient from those that its neighbours have put, in the neighbours' order.
// Parameters are an engine::Updater's, which commits them at the end of each epoch.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/updater.h"
#include "smartinf/graph/shares.h"

#include "workloads/gnn/graph_folder.h"
#include "workloads/gnn/layers.h"

namespace smartinf::workloads {

/// This process among those that train one graph.
struct RankOptions {
  uint32_t rank = 0, ranks = 1, servers = 1;
  uint32_t preload = 1;                     // propagations that need nothing of other servers
  std::optional<graph::Sampling> sampling;  // each server trains on a sample, without others' rows
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

/// What an epoch of a rank holds in memory and moves.
struct EpochPlan {
  graph::Spread spread;
  std::vector<graph::Propagation> steps;
  std::optional<graph::Csr> sample;  // of the server
  /// Vertices that rows of the tables are of: those that are computed, by ring, then those that are
  /// only read.
  std::vector<graph::Vertex> vertices;
  size_t features = 0;  // how many of them have features that do not come anew in each epoch
  struct Exchange {
    std::vector<std::vector<graph::Vertex>> send, receive;  // [ranks]
  };
  std::vector<Exchange> exchanges;  // [steps]
  std::vector<Part> parts;
  struct Table {
    std::string name;
    uint32_t dim = 0;
    bool in_memory = false;
  };
  /// Features, then the activations between layers, then gradients of these, in up to two sets that
  /// take turns: `own` and `to_neighbours` of LayerPass::InputGradient, as far as the model has
  /// both.
  std::vector<Table> tables;
  uint64_t part_bytes = 0;          // of the largest part, while the next one is gathered
  uint64_t rows_gathered = 0;       // of an epoch, from devices
  uint64_t rows_put = 0;            // to them
  uint64_t up_bytes = 0;            // over the devices' links: rows
  uint64_t down_bytes = 0;          // rows and their numbers
  uint64_t within_bytes = 0;        // that this rank sends to ranks of its server
  uint64_t between_bytes = 0;       // and to those of others
  uint64_t table_memory_bytes = 0;  // of the devices' tables

  size_t activations(size_t layer) const { return layer; }  // that the layer begins with
};

/// memory_bytes: half of it is for parts, a quarter for tables, which stay in memory as far as they
/// fit, features first, and a quarter is the devices'. Errors: kOutOfMemory, a block with its
/// neighbours does not fit: with what is needed and given; kInvalidArgument, more parts or
/// ranks than blocks, and what ranks cannot be shared out among.
base::Result<EpochPlan> plan_epoch(const Graph& graph, std::span<const Layer> layers,
                                   const EpochOptions& options);

/// Counted for each number of preloaded hops, 0 first. Errors: of ranks, as above.
base::Result<std::vector<graph::PreloadCost>> preload_costs(const Graph& graph,
                                                            std::span<const Layer> layers,
                                                            const RankOptions& ranks);

struct EpochReport {
  uint64_t epoch = 0;                // from 1; 0: before the first
  double loss = 0;                   // mean over the vertices that are trained with
  std::array<double, 3> accuracy{};  // of training, validation and test
  double seconds = 0;
  uint64_t up_bytes = 0, down_bytes = 0;         // counted by this rank's devices, as planned above
  double exchange_seconds = 0;                   // of this rank, with waiting for others
  uint64_t within_bytes = 0, between_bytes = 0;  // of all ranks
  uint64_t planned_within_bytes = 0, planned_between_bytes = 0;
};

/// Threads: one caller.
class Epochs {
 public:
  /// Takes up the run on the devices, or begins one. graph outlives it. Errors: kMismatch, the
  /// devices hold a run of another graph or model, both are named; kNoSpace with what is needed and
  /// free; of plan_epoch() and the devices.
  static base::Result<std::unique_ptr<Epochs>> open(const Graph& graph,
                                                    const EpochOptions& options);
  const EpochPlan& plan() const { return plan_; }
  uint64_t done() const { return done_; }
  bool fresh() const { return fresh_; }

  /// With the parameters as they are before its update.
  base::Result<EpochReport> train();
  /// Without training.
  base::Result<EpochReport> evaluate() { return pass(false); }
  /// The parameters, as a safetensors file, which rank 0 writes.
  base::Status write_parameters(const std::string& path) const;

 private:
  /// Rows of a table on devices or in memory.
  struct Wanted {
    size_t table = 0;
    bool with_halo = true;
  };
  using Gathered = std::vector<std::vector<float>>;

  Epochs(const Graph& graph, const EpochOptions& options, std::vector<Layer> layers);
  base::Status begin();
  base::Status open_devices();
  base::Result<std::vector<float>> first_parameters() const;
  base::Status put_features();
  base::Result<EpochReport> pass(bool trains);
  base::Status update();

  bool alone() const { return options_.ranks.collectives == nullptr; }
  /// Some rows of features come from other ranks in each epoch.
  bool features_come() const { return plan_.features < plan_.vertices.size(); }
  bool first_rank() const { return options_.ranks.rank == 0; }
  /// Sums up what all ranks have found.
  base::Status share_report(std::span<const double> block_losses, EpochReport& report,
                            std::array<uint64_t, 6>& counts);
  /// The first rank of this one's server.
  uint32_t leader() const {
    return options_.ranks.rank - options_.ranks.rank % plan_.spread.ranks_of_server();
  }
  /// Rank 0 gets all ranks' sums, those of a server from its leader. Servers' samples are summed
  /// server by server.
  base::Status share_sums();
  base::Status send_sums(uint32_t to);
  base::Status receive_sums(uint32_t first, uint32_t end, uint32_t stride);
  /// Rank 0's to all, by leaders; fails on all ranks where it has failed on one.
  base::Status share_parameters(const base::Status& mine);
  template <typename T>
  base::Status send(std::span<const T> values, uint32_t to) {
    SI_ASSIGN_OR_RETURN(const auto call, options_.ranks.collectives->send(
                                             engine::Channel::kControl, std::as_bytes(values), to));
    return call->wait();
  }
  template <typename T>
  base::Status receive(std::span<T> values, uint32_t from) {
    SI_ASSIGN_OR_RETURN(const auto call,
                        options_.ranks.collectives->receive(engine::Channel::kControl,
                                                            std::as_writable_bytes(values), from));
    return call->wait();
  }
  /// Rows of a table that ranks lack for a propagation.
  base::Status exchange(size_t step, size_t table, EpochReport& report);

  std::vector<int64_t> rows_of(std::span<const graph::Vertex> vertices) const;
  base::Status read(size_t table, std::span<const graph::Vertex> vertices, std::span<float> out);
  base::Status write(size_t table, std::span<const graph::Vertex> vertices,
                     std::span<const float> values);
  base::Result<Gathered> gather(const Part& part, std::span<const Wanted> wanted);
  /// compute(part, rows) of each part of the rings up to this one, while the rows of the next are
  /// gathered.
  template <typename Compute>
  base::Status over_parts(uint32_t rings, std::vector<Wanted> wanted, const Compute& compute);

  const Graph& graph_;
  const EpochOptions options_;
  const std::vector<Layer> layers_;
  std::string identity_;
  EpochPlan plan_;
  std::vector<uint32_t> row_of_;               // [vertices]: of this rank's tables
  std::vector<std::vector<float>> in_memory_;  // by table
  std::vector<int32_t> trained_;               // labels of those that are trained with, else -1
  plan::ParameterSpace space_;
  uint64_t parameter_count_ = 0;
  std::vector<float> parameters_;
  std::vector<BlockSums> sums_;  // by layer
  std::unique_ptr<LayerPass> layer_pass_;
  uint64_t done_ = 0;
  bool fresh_ = false;
  std::mutex tables_mutex_;
  std::unique_ptr<engine::Updater> updater_;
};

}  // namespace smartinf::workloads
