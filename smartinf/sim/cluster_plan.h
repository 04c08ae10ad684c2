// Search for the way in which a model is trained on a cluster: stages, replicas, micro batch,
// activations, and which box has which stage. A machine alone is a cluster of one box.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/sim/cluster.h"
#include "smartinf/sim/memory_need.h"
#include "smartinf/sim/model_shape.h"
#include "smartinf/sim/pipeline_step.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// A form in which gradients may go back between stages, and lose something.
struct ShortForm {
  std::string name;                                // compress.pipeline
  std::function<uint64_t(uint64_t tokens)> bytes;  // of a micro batch's
};

struct ClusterRequest {
  StepOptions options;           // rule, format, value_bytes, subgroups
  uint64_t tokens_per_step = 0;  // of all ranks
  /// Where these are given nothing else is tried.
  std::optional<uint32_t> pipeline;
  std::optional<uint64_t> micro_batch;
  std::optional<bool> recompute;
  std::optional<uint32_t> chunks;  // of a stage: ranks.chunks
  std::string split;          // layers of each of `pipeline` stages, "9, 8, 8, 7"
  std::optional<bool> folds;  // plan::Stages::folds
  bool all_boxes = false;  // fewer than all are not tried, and their order is kept: as they run
  /// Bytes of a message between stages over those of a whole one. Gradients: of those that are
  /// exposed; 1: none is compressed.
  double short_gradient = 1;
  double short_activation = 1;
  std::vector<ShortForm> forms;  // that are tried beside none, of as many gradients as are exposed
  /// StepOptions::compressed_gradient_bytes of so many stages, from the first on; not given: of as
  /// few as make the step as short as any number does.
  double compressed_gradient_bytes = 0;
  std::optional<uint32_t> compressed_stages;
};

/// One rank's memory, and its drives.
struct RankNeed {
  uint32_t box = 0;
  uint32_t stage = 0;
  MemoryNeed need;
  uint64_t host_limit_bytes = 0;  // 0: not known
  uint64_t gpu_limit_bytes = 0;   // likewise, and without a GPU
  double drive_life_days = 0;
};

struct ClusterOption {
  uint32_t pipeline = 1;
  uint32_t replicas = 1;
  uint64_t micro_batch = 1;   // sequences
  uint32_t accumulation = 1;  // micro batches of a step, of all replicas
  uint32_t ahead = 0;
  uint32_t chunks = 1;  // of a stage; of several the weights come from devices, as memory wants
  bool recompute = true;
  std::optional<size_t> form;    // of ClusterRequest::forms
  std::string compression;       // its name
  std::vector<uint32_t> order;   // boxes, the first has rank 0
  std::vector<uint32_t> begins;  // first unit of each part, and the number of units
  bool folds = false;            // plan::Stages::folds
  bool uneven = false;           // stages are not those of equal computing: a recipe has to say so

  double least_s = 0;  // no step is shorter
  double step_s = 0;
  double tokens_per_s = 0;
  std::string bound_by;
  std::vector<RankNeed> ranks;
  uint64_t boundary_bytes = 0;    // of a step, of one replica, over each boundary in each direction
  uint64_t back_bytes = 0;        // likewise gradients alone, some of them in a short form; at most
  std::vector<uint64_t> exposed;  // gradients that are compressed: exposed_gradients()
  uint32_t compressed_stages = 0;  // ClusterRequest::compressed_stages
  uint64_t exchange_bytes = 0;    // of a step, sent by one rank to its replicas
  double cost_per_mtoken = 0;     // 0: no prices given
  double order_gain = 0;          // seconds of the given order over those of the best, less 1
  bool reordered = false;
  std::vector<Span> spans;  // of a step with a pipeline
};

struct ClusterPlan {
  ModelShape model;
  Cluster cluster;
  StepOptions options;
  std::vector<ClusterOption> best;  // at most kBestMax, fastest first
  uint64_t considered = 0;          // ways; of these:
  uint64_t without_memory = 0;
  uint64_t simulated = 0;
  std::string lacks;  // where nothing fits, what the nearest lacks
};
inline constexpr size_t kBestMax = 5;

/// Tries all (pipeline, replicas, micro batch, activations), each with the best order of boxes and
/// the division of layers in which the slowest stage takes least, by its boxes' computing, drives,
/// links and memory. That is one of equal computing where it gains less than 1 %. Stages that have
/// no memory for their weights have the fewest chunks for which it is enough. Ways are tried by
/// memory as `smartinf train` plans it, then by least_step_s(), then on the virtual clock. The same
/// on every machine. Errors: kInvalidArgument for tokens that are not whole sequences; those of
/// check_train_can and simulate_step.
base::Result<ClusterPlan> plan_cluster(const ModelShape& model, const Cluster& cluster,
                                       const ClusterRequest& request);

/// "pipeline 2, 16 micro batches of 1, layers 15 + 13": what an option is, in words.
std::string option_text(const ClusterPlan& plan, const ClusterOption& option);
/// Layers of each stage, in the form of ranks.split.
std::string split_text(const ClusterPlan& plan, const ClusterOption& option);
/// What was found of the order of boxes, a sentence; empty where there is nothing to order.
std::string order_text(const ClusterPlan& plan, const ClusterOption& option);
/// torchrun's line on each of the option's boxes, in their order.
std::vector<std::string> cluster_launch(const ClusterPlan& plan, const ClusterOption& option,
                                        std::string_view recipe);
/// A recipe for `smartinf train` on the option's boxes. Errors: as plan_recipe.
base::Result<std::string> cluster_recipe(const ClusterPlan& plan, const ClusterOption& option,
                                         const std::string& data = {});

}  // namespace smartinf::sim
