// A training step of several ranks, each a stage of a pipeline, on a virtual clock: the order is
// that of plan/pipeline_schedule, which the trainer runs, too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/sim/cluster.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// Ranks of a step: rank r is replica r % replicas of stage r / replicas.
struct PipelineLoad {
  uint32_t stages = 1;
  uint32_t replicas = 1;
  uint32_t ahead = 0;   // plan::pipeline_actions()
  uint32_t chunks = 1;  // of a stage; of several: plan::looped_actions()
  /// Every exchange is waited for by both ends, as in torch's and Megatron's pipelines.
  bool waits = false;
  bool late = true;               // the update runs beside the next step's first forward
  std::vector<StageTimes> times;  // of each rank, and behind these of each one's next chunk
  /// Of each replica of the first stage: forward and backward of a head that is folded
  /// (plan/pipeline_schedule.h); empty: none is.
  std::vector<double> head_s = {};
  std::vector<uint32_t> box;            // of each rank, in the cluster
  std::vector<uint64_t> micro_batches;  // of each replica
  uint64_t message_bytes = 0;           // of a micro batch, at each boundary and in each direction
  /// Gradients that go back in a short form.
  struct ShortGradients {
    uint64_t bytes = 0;          // of a micro batch
    double make_s = 0;           // beside computing
    std::vector<uint64_t> last;  // by sender: so many of a step, its last ones; empty: none
  };
  ShortGradients shorts = {};
  uint64_t forward_bytes = 0;  // of an activation in a short form; 0: message_bytes

  bool folds() const { return !head_s.empty(); }
  /// Senders of messages back: parts of the model, and a folded head behind the last.
  uint32_t senders() const { return chunks * stages + (folds() ? 1 : 0); }
  /// The rank of a sender.
  uint32_t rank_of(uint32_t sender, uint32_t replica) const {
    return sender % stages * replicas + replica;
  }
  uint32_t ranks() const { return stages * replicas; }
  const StageTimes& of(uint32_t rank, uint32_t chunk) const {
    return times[chunk * ranks() + rank];
  }
  uint32_t stage(uint32_t rank) const { return rank / replicas; }
  uint64_t batches(uint32_t rank) const { return micro_batches[rank % replicas]; }
};

struct PipelineTimes {
  double step_s = 0;
  std::vector<double> computing;  // share of the step, of each rank
  std::string bound_by;           // what is busy for the largest part of it, and that part
  double bound_share = 0;
  std::vector<Span> spans;  // of one step
};

/// A step in the steady state: the time from when all ranks have ended backward to when they have
/// again. Ranks of a box share its links, and each link's two directions are apart. trace: keeps
/// spans. Pure; deterministic to the bit.
PipelineTimes simulate_pipeline(const PipelineLoad& load, const Cluster& cluster,
                                bool trace = false);

/// How many gradients each stage has to send in their short form, of the last ones of a step, for
/// the step to be as short as with all of them, as far as that is no more than 0.5 % of it. By
/// sender; of the first one 0. Pure.
std::vector<uint64_t> exposed_gradients(const PipelineLoad& load, const Cluster& cluster);

/// No step is shorter: each stage computes all its micro batches behind the first one's way to it,
/// and before the last one's way back; each link carries its messages.
double least_step_s(const PipelineLoad& load, const Cluster& cluster);

}  // namespace smartinf::sim
