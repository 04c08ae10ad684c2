// Training of a graph network over all vertices, layer by layer and part by part: features,
// activations and their gradients are tables of rows on devices, of which a part's rows and those
// of its neighbours are in memory at a time.
//
//   forward    gather (activations of the layer before) -> compute -> put
//   backward   gather (the same, and gradients) -> compute forward again, then backward -> put
//
// What is read and written is behind the computing: while a part is computed, results of the part
// before are put and rows of the next are gathered. Several ranks each do so for vertices of their
// own (rank_exchange.h). Rank 0 has the parameters.
//
// A vertex collects its gradient from those that its neighbours have put, in the neighbours' order.
// Parameters are an engine::Updater's, which commits them at the end of each epoch.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/updater.h"

#include "workloads/gnn/epoch_plan.h"
#include "workloads/gnn/rank_exchange.h"

namespace smartinf::workloads {

/// Threads: one caller.
class Epochs {
 public:
  /// Takes up the run on the devices, or begins one. graph outlives it. Errors: kMismatch, the
  /// devices hold a run of another graph or model, both are named; kNoSpace with what is needed and
  /// free; of plan_epoch() and the devices.
  static base::Result<std::unique_ptr<Epochs>> open(const Graph& graph,
                                                    const EpochOptions& options);
  const EpochPlan& plan() const { return plan_; }
  /// Epochs.
  uint64_t done() const { return done_ / options_.ranks.batches; }
  bool fresh() const { return fresh_; }

  /// With the parameters as they are before its update, or each batch's.
  base::Result<EpochReport> train();
  /// Without training.
  base::Result<EpochReport> evaluate();
  /// The parameters, as a safetensors file, which rank 0 writes.
  base::Status write_parameters(const std::string& path) const;

 private:
  using Gathered = std::vector<std::vector<float>>;  // of EpochPlan::wanted()
  /// Results of a part that are to be put to a device.
  struct Results {
    size_t table = 0;
    const Part* part = nullptr;
    std::vector<float> values;
  };

  Epochs(const Graph& graph, const EpochOptions& options, std::vector<Layer> layers);
  base::Status begin();
  base::Status open_devices();
  base::Result<std::vector<float>> first_parameters() const;
  base::Status put_features();
  /// Goes over to a batch.
  void take(uint32_t batch);
  /// Adds a batch, or all.
  base::Status pass(bool trains, EpochReport& report);
  EpochReport finished(EpochReport report) const;
  base::Status update();

  /// Some rows of features come from other ranks in each epoch.
  bool features_come() const { return plan_.features < plan_.vertices.size(); }
  bool first_rank() const { return exchange_.first_rank(); }
  base::Status share_parameters(const base::Status& mine) {
    return exchange_.parameters(mine, done_, std::span(parameters_).first(parameter_count_));
  }

  std::vector<int64_t> rows_of(std::span<const graph::Vertex> vertices) const;
  /// halo: of a part.
  base::Status read(size_t table, std::span<const graph::Vertex> vertices, std::span<float> out,
                    bool halo = false);
  base::Status write(size_t table, std::span<const graph::Vertex> vertices,
                     std::span<const float> values);
  /// To memory at once, and to devices behind the computing.
  base::Status put(size_t table, const Part& part, std::span<const float> values);
  /// What a layer hands to the one before it.
  base::Status hand_on(size_t layer, const Part& part, const LayerPass::InputGradient& gradient);
  /// Puts results, then gathers what a step takes for a part; null: nothing.
  base::Status put_and_gather(size_t step, std::vector<Results> results, const Part* part,
                              Gathered& gathered);
  /// compute(part, rows) of each part that a step is computed for.
  template <typename Compute>
  base::Status over_parts(size_t step, EpochReport& report, const Compute& compute);

  const Graph& graph_;
  const EpochOptions options_;
  const std::vector<Layer> layers_;
  std::string identity_;
  EpochPlan plan_;                // of the batch
  std::vector<EpochPlan> plans_;  // of the others
  uint32_t batch_ = 0;
  std::vector<uint32_t> row_of_;               // [vertices]: of this rank's tables
  std::vector<std::vector<float>> in_memory_;  // by table
  std::vector<std::vector<float>> halos_;      // by table, [EpochPlan::shared]
  std::vector<uint32_t> shared_at_;            // of a row among these
  std::vector<int32_t> trained_;               // labels of those that are trained with, else -1
  plan::ParameterSpace space_;
  uint64_t parameter_count_ = 0;
  std::vector<float> parameters_;
  std::vector<BlockSums> sums_;  // by layer
  std::unique_ptr<LayerPass> layer_pass_;
  uint64_t done_ = 0;    // batches of all epochs
  EpochReport current_;  // rank 0: what an epoch's batches have found that are done
  bool fresh_ = false;
  std::vector<Results> results_;      // of the part that was computed last
  std::array<Gathered, 2> gathered_;  // for a part and the next one
  RankExchange exchange_;
  std::unique_ptr<engine::Updater> updater_;
};

}  // namespace smartinf::workloads
