// Training of a graph network over all vertices, layer by layer and part by part: features,
// activations and their gradients are tables of rows on devices, of which a part's rows and those
// of its neighbours are in memory at a time.
//
//   forward    gather (activations of the layer before) -> compute -> put
//   backward   gather (the same, and gradients) -> compute forward again, then backward -> put
//
// A vertex collects its gradient from those that its neighbours have put, in the neighbours' order.
// Parameters are an engine::Updater's, which commits them at the end of each epoch.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/updater.h"

#include "workloads/gnn/graph_folder.h"
#include "workloads/gnn/layers.h"

namespace smartinf::workloads {

struct EpochOptions {
  ModelOptions model;
  std::vector<std::string> devices;
  uint64_t memory_bytes = uint64_t{1} << 30;
  uint64_t keep_bytes = ~uint64_t{0};  // of tables in memory; at most a quarter of it
  uint32_t parts = 0;                  // 0: as few as fit
  uint32_t threads = 0;                // 0: the cores
  double lr = 0.01;
  uint64_t seed = 1;
  bool create = true;
};

/// What an epoch holds in memory and moves.
struct EpochPlan {
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
  uint64_t table_memory_bytes = 0;  // of the devices' tables

  size_t activations(size_t layer) const { return layer; }  // that the layer begins with
};

/// memory_bytes: half of it is for parts, a quarter for tables, which stay in memory as far as they
/// fit, features first, and a quarter is the devices'. Errors: kOutOfMemory, a block with its
/// neighbours does not fit: with what is needed and given; kInvalidArgument, more parts than
/// blocks.
base::Result<EpochPlan> plan_epoch(const Graph& graph, std::span<const Layer> layers,
                                   const EpochOptions& options);

struct EpochReport {
  uint64_t epoch = 0;                // from 1; 0: before the first
  double loss = 0;                   // mean over the vertices that are trained with
  std::array<double, 3> accuracy{};  // of training, validation and test
  double seconds = 0;
  uint64_t up_bytes = 0, down_bytes = 0;  // counted by the devices, as planned above
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
  /// The parameters, as a safetensors file.
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
  base::Status put_features();
  base::Result<EpochReport> pass(bool trains);
  base::Status update();

  base::Result<Gathered> gather(const Part& part, std::span<const Wanted> wanted);
  base::Status put(size_t table, const Part& part, std::span<const float> values);
  /// compute(part, rows) of each part, while the rows of the next are gathered.
  template <typename Compute>
  base::Status over_parts(std::vector<Wanted> wanted, const Compute& compute);

  const Graph& graph_;
  const EpochOptions options_;
  const std::vector<Layer> layers_;
  std::string identity_;
  EpochPlan plan_;
  std::vector<std::vector<float>> in_memory_;  // by table
  std::vector<int32_t> trained_;               // labels of those that are trained with, else -1
  plan::ParameterSpace space_;
  uint64_t parameter_count_ = 0;
  std::vector<float> parameters_, gradient_;  // of the space
  std::unique_ptr<LayerPass> layer_pass_;
  uint64_t done_ = 0;
  bool fresh_ = false;
  std::mutex tables_mutex_;
  std::unique_ptr<engine::Updater> updater_;
};

}  // namespace smartinf::workloads
