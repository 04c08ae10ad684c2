// The trainer on torch: training loop in torch_trainer.cc, opening of a run in trainer_start.cc,
// validation and sampling in evaluation.cc. What it is made of has a file each: the run and its
// folder (run.h), the model's weights (model_weights.h), a step's gradients on their way
// (step_gradients.h) and its clock (step_clock.h).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/types.h>

#include "smartinf/engine/updater.h"
#include "smartinf/plan/stages.h"
#include "smartinf/train/corpus.h"
#include "smartinf/train/guarded.h"
#include "smartinf/train/layer_stats.h"
#include "smartinf/train/memory_plan.h"
#include "smartinf/train/memory_updater.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/model_weights.h"
#include "smartinf/train/offload_choice.h"
#include "smartinf/train/overlap_choice.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/residual_schedule.h"
#include "smartinf/train/run.h"
#include "smartinf/train/step_clock.h"
#include "smartinf/train/step_gradients.h"
#include "smartinf/train/tensor_memory.h"
#include "smartinf/train/trainer.h"
#include "smartinf/train/unit_pass.h"

namespace smartinf::train {

class TorchTrainer final : public Trainer {
 public:
  /// targets: of adapters; empty: the model's own weights are trained.
  TorchTrainer(Options options, ModelSource source, std::vector<model::LoraTarget> targets,
               Corpus corpus, RunFolder folder, GroupedParameters parameters,
               torch::Device accelerator, plan::TrainingPlan plan, plan::Pipeline pipeline,
               std::vector<std::string> stage_lines, Ranks ranks)
      : options_(std::move(options)),
        source_(std::move(source)),
        targets_(std::move(targets)),
        corpus_(std::move(corpus)),
        space_(std::move(parameters.space)),
        groups_(std::move(parameters.groups)),
        table_lr_factor_(parameters.table_lr_factor),
        plan_(std::move(plan)),
        pipeline_(std::move(pipeline)),
        stage_lines_(std::move(stage_lines)),
        ranks_(std::move(ranks)),
        mine_(plan::micro_batches_of(options_.train.accumulation,
                                     pipeline_.stages.replica(ranks_.rank()), replicas())),
        run_(std::move(folder)),
        weights_(accelerator, precision_data_type(options_.train.precision)),
        overlap_(options_.train.where == OptimizerWhere::kMemory ? Overlap::kNone
                                                                 : options_.train.overlap,
                 options_.train.clip_norm) {}

  ~TorchTrainer() override {
    // A commit in flight writes from memory that this object owns.
    if (updater_ != nullptr) static_cast<void>(updater_->wait_commit());
    pass_.reset();  // inputs are in the updater's spool
    weights_.close();
  }

  /// Errors also: of a state that came to the devices since `run_start` was made.
  base::Status start(const Job& job, const RunStart& run_start);

  const Options& options() const override { return options_; }
  base::StepNumber step() const override { return run_.step; }
  base::Result<StepReport> train_step(std::stop_token stop) override;
  base::Result<std::optional<engine::CheckpointSummary>> checkpoint(
      const engine::StateProgress& progress) override;
  base::Result<std::optional<engine::CheckpointSummary>> keep_best(
      double loss, const engine::StateProgress& progress) override;
  base::Result<Validation> validate() override;
  TextForm text_form() const override { return train::text_form(options_, source_); }
  base::Result<std::vector<std::vector<int64_t>>> sample(
      std::span<const std::vector<int64_t>> prompts, std::stop_token stop) override;
  base::Result<engine::UpdaterTraffic> finish() override;
  std::vector<std::string> describe() const override;

 private:
  /// guarded(), and what fails here fails on the other ranks too.
  template <typename Body>
  auto together(const char* doing, Body body) -> decltype(body()) {
    auto made = guarded(doing, std::move(body));
    if (const base::Status status = status_of(made);
        !status.ok() && status.code() != base::ErrorCode::kCancelled) {
      ranks_.failed(status);
    }
    return made;
  }
  static base::Status status_of(const base::Status& status) { return status; }
  template <typename T>
  static base::Status status_of(const base::Result<T>& result) {
    return result.status();
  }

  /// Ranks that share the micro batches of a step.
  uint32_t replicas() const { return pipeline_.stages.replicas; }
  /// The rank that has the losses of a replica.
  uint32_t rank_of_head(uint64_t replica) const {
    return pipeline_.stages.of_head() * replicas() + static_cast<uint32_t>(replica);
  }
  /// Elements of what is trained by the ranks that compute with them; empty: all of them.
  std::vector<plan::RankSpan> spans_of_stages() const;
  std::optional<UnitPass::Stage> make_stage() const;
  base::Result<Batch> read_batch(const Windows& from, std::span<const uint64_t> windows) const;
  /// The micro batches of the next step that this rank computes. targets: of all ranks'. Errors:
  /// kCancelled where several ranks have to stop.
  base::Result<std::vector<Batch>> next_batches(const std::stop_token& stop, uint64_t& targets);
  torch::Tensor first_tokens_of_next_step() const;
  /// Losses of all micro batches of the step, in their order. mine: of this rank's.
  base::Result<std::vector<double>> losses_of_all(std::span<const double> mine) const;

  StepReport begin_report() const;
  /// Forward and backward of a step.
  base::Status compute_gradients(std::span<const Batch> batches, const std::stop_token& stop,
                                 StepReport& report);
  /// At the updater; waits for the commit of the step before.
  base::Status begin_step();
  base::Status start_update(const engine::GradientSummary& summary);
  /// The step is made: what it took and moved.
  void complete_report(StepReport& report, const engine::GradientSummary& summary);
  base::Status start_commit(const std::stop_token& stop);
  /// A step whose gradients are not finite: it is not made, and the next one sees other data.
  base::Result<StepReport> skip(StepReport report, const std::string& parameter);
  /// Over windows that are spread evenly. what: for messages. Errors: kFailedPrecondition where
  /// none of them has a target.
  base::Result<double> mean_loss(const Windows& from, const std::string& what);
  base::Result<std::optional<engine::CheckpointSummary>> keep_copy(
      engine::CheckpointOptions options);
  base::Status find_best_loss();
  base::Result<std::vector<std::vector<int64_t>>> first_ranks_prompts(
      std::span<const std::vector<int64_t>> prompts) const;
  double clip_factor(const engine::GradientSummary& summary) const;
  engine::UpdateOptions update_options(double clip_factor) const;
  base::Status open_devices(const Job& job, const RunStart& run_start);
  /// Step 0. What a failure leaves on the devices and in the folder is removed.
  base::Status initialize(const Job& job);
  /// Of the whole model, its embedding first, or of all adapters.
  base::Result<engine::Updater::FillWeights> first_weights() const;
  base::Status open_frozen_weights(const Job& job);
  base::Result<std::unique_ptr<engine::Updater>> open_with_spool(engine::UpdaterOptions options,
                                                                 base::StepNumber trained);
  uint64_t bytes_of_all(const engine::UpdaterOptions& options, uint64_t bytes) const;
  /// options with what the plan gives to streaming and to the spool.
  engine::UpdaterOptions planned(engine::UpdaterOptions options) const;
  base::Status check_beginning(const Job& job, const engine::UpdaterOptions& options,
                               const storage::RunId& old);
  void give_up_offload();
  base::Status make_pass(base::DataType gradient_type);
  void report_traffic(StepReport& report);
  void choose_offload(StepReport& report);
  /// Before and after each step: nothing, or what train.layer_stats_every asks for.
  base::Status begin_layer_stats();
  base::Status end_layer_stats();
  // Destroyed last, when all tensors are gone: their pages go back before the process ends, because
  // torch's own end touches much of its library for the first time and needs room for that.
  struct TensorMemory {
    ~TensorMemory() { unmap_waiting_pages(); }
  } tensor_memory_;
  Options options_;
  ModelSource source_;
  std::vector<model::LoraTarget> targets_;
  Corpus corpus_;
  std::optional<StoredLogits> teacher_logits_;
  plan::ParameterSpace space_;  // of what is trained
  std::vector<ParameterGroup> groups_;
  double table_lr_factor_;
  plan::TrainingPlan plan_;
  plan::Pipeline pipeline_;
  std::vector<std::string> stage_lines_;  // text about it; empty without
  Ranks ranks_;
  plan::MicroBatchRange mine_;  // of a step

  Run run_;
  std::string compression_;  // text about it; empty where gradients are dense
  storage::RingKind ring_ = storage::RingKind::kAuto;
  bool in_memory_ = false;  // optimizer.where = "memory"
  ModelWeights weights_;
  std::unique_ptr<UnitPass> pass_;
  std::optional<OffloadChoice> offload_choice_;
  std::unique_ptr<engine::Updater> updater_;  // after the weights: it writes into them
  std::optional<StepGradients> gradients_;

  StepClock clock_;
  OverlapChoice overlap_;
  ResidualSchedule residual_;
  engine::UpdaterTraffic traffic_;           // until the last report
  double spool_waited_s_ = 0;                // by the pass, until the last step
  std::unique_ptr<LayerStats> layer_stats_;  // of this step; null where it is not asked for
  std::optional<double> best_loss_;          // of the copy that keep_best() made
};

}  // namespace smartinf::train
