// Forward and backward over micro batches, unit by unit: each unit does all micro batches that it
// is given before the next unit starts, so that its weights are needed once in each direction.
// Backward is a pass of autograd over one unit and one micro batch at a time; between units there
// are activations in forward and their gradients in backward.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/edge.h>
#include <torch/types.h>

#include "smartinf/plan/micro_batches.h"
#include "smartinf/plan/pipeline_schedule.h"
#include "smartinf/train/adapters.h"
#include "smartinf/train/gradient_tree.h"
#include "smartinf/train/layer_stream.h"
#include "smartinf/train/model.h"
#include "smartinf/train/saved_tensors.h"
#include "smartinf/train/spooled_buffers.h"
#include "smartinf/train/stage_link.h"
#include "smartinf/train/step_report.h"
#include "smartinf/train/top_logits.h"
#include "smartinf/train/unit_inputs.h"

namespace smartinf::train {

struct Batch {
  torch::Tensor tokens_BT;   // int64, on the accelerator
  torch::Tensor targets_BT;  // the token after each; kNoTarget (-100): it does not count
  uint64_t targets = 0;      // targets that count
  DocumentEnds document_ends = {};
  std::optional<TopLogits> teacher = {};  // by row: the loss is the divergence from these
};

/// Threads: one caller; torch's own threads work inside. Errors: torch throws; StatusError of the
/// stream and of callbacks.
class UnitPass {
 public:
  /// One stage of a pipeline: this process computes these units alone.
  struct Stage {
    struct Chunk {
      size_t begin = 0;  // units [begin, end)
      size_t end = 0;
    };
    std::vector<Chunk> chunks;                  // one, several by turns, or a folded head behind
    std::vector<plan::PipelineAction> actions;  // of a step
    bool looped = false;   // each chunk does all micro batches; its weights may be streamed
    uint64_t at_once = 1;  // messages that are awaited
    std::unique_ptr<StageLink> link;
  };

  /// recompute: a unit keeps its input alone, and backward computes it again. Nothing in a unit is
  /// random, so the second time has the bits of the first. saved: what autograd keeps of units of
  /// layers goes through these buffers instead, where offload() says so and it is not larger than
  /// they are. adapters: what is trained instead of the model's own weights; null: those. All that
  /// is referred to outlives it. stage: without `saved` and with inputs that stay tensors; all
  /// units of one chunk stay. None: all units are computed here.
  UnitPass(const Model& model, LayerStream& stream, Adapters* adapters, bool recompute,
           UnitInputs inputs, std::optional<SpooledBuffers> saved,
           std::optional<Stage> stage = std::nullopt);

  /// Gradient of a step, as far as this process has it, of the parameter of `count` elements from
  /// `first` on. Of all micro batches it is one sum. Of a rank's share there are sums of several,
  /// those of plan::summation_nodes(), in their order; of an embedding that is the head's matrix
  /// too in two trees, first the head's sums and then the embedding's, and the gradient is the sum
  /// of the trees. Each is of the weights' type for one micro batch, else f32. A stage has none of
  /// parameters of others, and of such an embedding the tree that it computes.
  struct Gradient {
    uint64_t first = 0;
    uint64_t count = 0;
    std::vector<torch::Tensor> sums;
    uint32_t trees = 1;
  };
  /// Backward has used the weights of the gradient's unit for the last time; units come from the
  /// last to the first.
  using TakeGradient = std::function<void(Gradient gradient)>;
  struct Options {
    uint64_t micro_batches = 1;           // of the step, on all ranks
    plan::MicroBatchRange mine = {0, 1};  // that this process computes; behind the last of them
                                          // gradients are given out
    bool by_tree = true;  // gradients are added by plan/micro_batches.h's tree; else one after the
                          // other, where this process computes all
    uint64_t first = 0;   // the number of the pass's first batch, of `mine`, in order
    bool times_forward = false;  // beside an accelerator backward begins when it has computed it
    /// Targets of the step that count, divided by its number of batches.
    double targets_per_batch = 0;
    /// Tokens of the batch behind these, whose rows of a table are brought up beside them;
    /// undefined: there is none.
    torch::Tensor tokens_behind_BT;
    /// Lookups in the table that follow for nothing: all ranks make as many in a step.
    uint64_t lookups_behind = 0;
    /// Before each unit of the forward; what it throws ends the pass.
    std::function<void()> before_unit;
    TakeGradient take_gradient;
  };
  /// The loss of each batch in nats: the sum over its targets, divided by targets_per_batch. So the
  /// mean over the step's batches is the mean over the step's targets. Gradients are those of these
  /// losses, summed over batches by plan/micro_batches.h's tree: the same bits in one pass over
  /// several batches and in several passes over one each.
  /// A stage is given all micro batches of `mine` at once, and gives out gradients when it has sent
  /// its last message, or the last one of a chunk; only the head's stage has losses.
  std::vector<double> train(std::span<const Batch> batches, const Options& options);
  /// The units in the order in which train() uses them.
  std::vector<uint32_t> order() const;
  /// The mean loss over the batch's targets, without gradients; 0 where it has none, and on stages
  /// without the head.
  double loss(const Batch& batch);
  /// A sequence that is continued.
  struct Continued {
    torch::Tensor tokens_1T;  // that its cache does not have yet; int64, on the accelerator
    TensorCache* cache;
  };
  /// Logits of the token that follows each sequence, [V]; the caches get what is new. Each sequence
  /// is computed by itself, so its bits do not depend on the others; weights are brought once for
  /// all of them. before_unit: before each unit; what it throws ends the pass, and the caches are
  /// of no use then.
  std::vector<torch::Tensor> next_logits(std::span<const Continued> sequences,
                                         const std::function<void()>& before_unit);
  /// Begins sequences: their caches, which are empty, get the keys and values of these tokens.
  /// Otherwise as next_logits().
  struct Begun {
    torch::Tensor tokens_1T;
    KeyValueCache* cache;
  };
  void fill_caches(std::span<const Begun> sequences, const std::function<void()>& before_unit);
  /// The units in the order in which a forward uses them; with a tied head the embedding again.
  std::vector<uint32_t> forward_order() const;

  /// Sets how many of the units of layers and micro batches go through `saved` in the next passes;
  /// at first all. Which ones follows from the number (is_offloaded).
  void offload(uint64_t count) { to_offload_ = count; }
  /// Number of those that did in the last pass.
  uint64_t offloaded() const { return offloaded_; }
  /// Null where nothing is offloaded.
  SpooledBuffers* saved() { return saved_ ? &*saved_ : nullptr; }

  /// Seconds that it has waited for weights, in all passes.
  double waited_s() const {
    return stream_.waited_s() + (adapters_ != nullptr ? adapters_->waited_s() : 0);
  }
  /// When train() last went from forward to backward, on the monotonic clock, and waited_s() then.
  uint64_t backward_began_ns() const { return backward_began_ns_; }
  double backward_began_waited_s() const { return backward_began_waited_s_; }
  /// What a stage computed in the last train().
  std::span<const Phase> stage_phases() const { return stage_phases_; }
  /// Null without a pipeline.
  const StageLink* link() const { return stage_ ? stage_->link.get() : nullptr; }

 private:
  struct Head {
    const UnitWeights& weights;
    const torch::Tensor& matrix_VC;
  };
  /// A unit's forward for one micro batch, as autograd has it.
  struct Graph {
    torch::autograd::Edge output;
    std::vector<torch::Tensor> leaves;    // the unit's trained tensors, then its input
    std::shared_ptr<SavedTensors> saved;  // null: autograd has them
  };
  std::pair<Graph, torch::Tensor> compute(size_t unit, const UnitWeights& weights,
                                          const torch::Tensor& input, size_t batch,
                                          bool record) const;
  torch::Tensor rows_of(size_t batch) const;
  torch::Tensor run_layers(size_t unit, const UnitWeights& weights, const torch::Tensor& input,
                           const DocumentEnds& documents, KeyValueCache* cache = nullptr) const;
  std::vector<Parameter> trained(size_t unit, const UnitWeights& weights) const;
  Graph graph_of(size_t unit, const UnitWeights& weights, size_t batch);
  Head get_head();
  void release_head();
  /// Input of a forward without gradients.
  struct Input {
    torch::Tensor tokens_BT;
    DocumentEnds documents;
    KeyValueCache* cache = nullptr;
  };
  /// [B, T, C] of each, before the head. The stream has been started.
  std::vector<torch::Tensor> forward_without_gradients(std::span<const Input> inputs,
                                                       const std::function<void()>& before_unit);
  std::vector<double> train_stage();
  void forward_stage(const Stage::Chunk& chunk, size_t batch);
  void backward_stage(const Stage::Chunk& chunk, size_t batch, std::vector<double>& losses);
  /// Weights of a unit for a micro batch of a stage: held, where it has chunks, from the first to
  /// the last one.
  const UnitWeights& hold(size_t unit, size_t batch);
  void let_go(size_t unit, size_t batch);
  void emit_stage(size_t& next, size_t begin);
  bool has_head() const { return !stage_ || stage_->chunks.back().end == model_.units().size(); }
  bool offloads(size_t unit, size_t batch) const;
  void forward_unit(size_t unit, const UnitWeights& weights, size_t batch);
  double head_of(const Head& head, size_t batch);
  void backward_unit(size_t unit, const UnitWeights& weights, size_t batch);
  void add_gradient(std::optional<GradientTree>& sums, torch::Tensor gradient) const;
  void emit_gradients(size_t unit, std::span<const Parameter> parameters);

  const Model& model_;
  LayerStream& stream_;
  Adapters* const adapters_;
  const bool recompute_;
  std::optional<Stage> stage_;
  uint64_t backward_began_ns_ = 0;
  double backward_began_waited_s_ = 0;
  std::vector<Phase> stage_phases_;

  // State of the pass in progress.
  std::span<const Batch> batches_;
  const Options* options_ = nullptr;
  UnitInputs inputs_;  // [B, T, C] of each unit and batch
  std::optional<SpooledBuffers> saved_;
  uint64_t to_offload_ = ~uint64_t{0};
  uint64_t offloaded_ = 0;
  std::vector<std::vector<Graph>> graphs_;    // by unit, batch; empty: computed again
  std::vector<torch::Tensor> gradients_BTC_;  // by batch: of the unit's output
  // State of the step, by unit and parameter: gradients so far.
  std::vector<std::vector<std::optional<GradientTree>>> sums_;
  std::optional<GradientTree> tied_sums_;  // the head's share of the embedding's gradient
  // Of a stage's chunk, until its last micro batch.
  std::vector<const UnitWeights*> held_;  // by unit
  std::optional<Head> held_head_;
};

}  // namespace smartinf::train
