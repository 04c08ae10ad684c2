// The trainer on torch: training loop in torch_trainer.cc, opening of a run in trainer_start.cc,
// validation and sampling in evaluation.cc.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/types.h>

#include "smartinf/engine/updater.h"
#include "smartinf/train/adapters.h"
#include "smartinf/train/corpus.h"
#include "smartinf/train/frozen_weights.h"
#include "smartinf/train/gradient_copies.h"
#include "smartinf/train/guarded.h"
#include "smartinf/train/layer_stats.h"
#include "smartinf/train/memory_plan.h"
#include "smartinf/train/memory_updater.h"
#include "smartinf/train/model.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/offload_choice.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/position.h"
#include "smartinf/train/run_choice.h"
#include "smartinf/train/run_folder.h"
#include "smartinf/train/tensor_memory.h"
#include "smartinf/train/trainer.h"
#include "smartinf/train/unit_pass.h"

namespace smartinf::train {

class TorchTrainer final : public Trainer {
 public:
  /// targets: of adapters; empty: the model's own weights are trained.
  TorchTrainer(Options options, ModelSource source, std::vector<model::LoraTarget> targets,
               Corpus corpus, RunFolder folder, GroupedParameters parameters,
               torch::Device accelerator, plan::TrainingPlan plan, Ranks ranks)
      : options_(std::move(options)),
        source_(std::move(source)),
        targets_(std::move(targets)),
        corpus_(std::move(corpus)),
        folder_(std::move(folder)),
        space_(std::move(parameters.space)),
        groups_(std::move(parameters.groups)),
        accelerator_(accelerator),
        plan_(std::move(plan)),
        ranks_(std::move(ranks)),
        mine_(plan::micro_batches_of(options_.train.accumulation, ranks_.rank(), ranks_.world())),
        weights_type_(precision_data_type(options_.train.precision)) {}

  ~TorchTrainer() override {
    // A commit in flight writes from memory that this object owns.
    if (updater_ != nullptr) static_cast<void>(updater_->wait_commit());
    pass_.reset();  // inputs are in the updater's spool
    if (stream_ != nullptr) stream_->close();
  }

  /// Errors also: of a state that came to the devices since `run_start` was made.
  base::Status start(const Job& job, const RunStart& run_start);

  const Options& options() const override { return options_; }
  base::StepNumber step() const override { return step_; }
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

  base::Result<Batch> read_batch(const Windows& from, std::span<const uint64_t> windows) const;
  /// The micro batches of the next step that this rank computes. targets: of all ranks'. Errors:
  /// kCancelled where several ranks have to stop.
  base::Result<std::vector<Batch>> next_batches(const std::stop_token& stop, uint64_t& targets);
  /// Of all micro batches of the step, in their order. mine: of this rank's.
  base::Result<std::vector<double>> losses_of_all(std::span<const double> mine) const;

  /// Forward and backward of a step.
  base::Status compute_gradients(std::span<const Batch> batches, const std::stop_token& stop,
                                 StepReport& report);
  /// A parameter's gradient of this step is complete.
  void take_gradient(UnitPass::Gradient gradient);
  base::Status begin_step();
  /// Of those that are ready. all: none is left on its way from an accelerator.
  base::Status put_gradients(bool all);
  base::Status put_oldest_copy();
  /// put_gradients() on several ranks.
  base::Status put_sums();
  bool residual_lags() const;
  bool must_write_residual(const std::stop_token& stop) const;
  base::Result<StepReport> skip(StepReport report, const std::string& parameter);
  /// The step is not made, and the next one sees other data. advice: where that happens too often.
  base::Result<StepReport> pass_over(StepReport report, std::string why, const char* advice);
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
  base::Status update(const engine::GradientSummary& summary);
  Overlap overlap_of_next_step() const;
  base::Status open_devices(const Job& job, const RunStart& run_start);
  /// Step 0. What a failure leaves on the devices and in the folder is removed.
  base::Status initialize(const Job& job);
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
  base::Status make_pass();
  /// Of the folder that rank 0 has.
  base::Result<base::StepNumber> first_ranks_logged_step() const;
  base::Status keep_history(const Job& job, const RunStart& run_start, base::StepNumber logged);
  void report_traffic(StepReport& report);
  void choose_offload(StepReport& report);
  /// Before and after each step: nothing, or what train.layer_stats_every asks for.
  base::Status begin_layer_stats();
  base::Status end_layer_stats();
  engine::WeightsSink weights_sink() const {
    return [this](uint64_t first) { return trained_->weights_at(first); };
  }
  double waited_for_weights_s() const {
    return stream_->waited_s() + (adapters_ != nullptr ? adapters_->waited_s() : 0);
  }
  /// An update goes on only as the forward asks for its weights.
  bool updates_follow_forward() const { return adapters_ == nullptr && stream_->streams(); }
  base::Status load_model();

  // Destroyed last, when all tensors are gone: their pages go back before the process ends, because
  // torch's own end touches much of its library for the first time and needs room for that.
  struct TensorMemory {
    ~TensorMemory() { unmap_waiting_pages(); }
  } tensor_memory_;
  Options options_;
  ModelSource source_;
  std::vector<model::LoraTarget> targets_;
  Corpus corpus_;
  RunFolder folder_;
  plan::ParameterSpace space_;  // of what is trained
  std::vector<ParameterGroup> groups_;
  torch::Device accelerator_;
  plan::TrainingPlan plan_;
  Ranks ranks_;
  plan::MicroBatchRange mine_;  // of a step
  base::DataType weights_type_;

  std::vector<std::string> device_paths_;
  std::string compression_;                // what is sent; empty where gradients are dense
  uint64_t residual_every_ = 0;            // 0: no residual is written
  base::StepNumber residual_written_ = 0;  // the last step of ours that was made to write it
  storage::RingKind ring_ = storage::RingKind::kAuto;
  std::unique_ptr<Model> model_;
  std::unique_ptr<FrozenWeights> frozen_;  // of the model, beside adapters
  std::unique_ptr<LayerStream> stream_;
  std::unique_ptr<Adapters> adapters_;  // null: the model's own weights are trained
  TrainedWeights* trained_ = nullptr;   // the adapters, else the stream
  std::unique_ptr<UnitPass> pass_;
  std::optional<OffloadChoice> offload_choice_;
  double spool_waited_s_ = 0;                        // by the pass, until the last step
  std::unique_ptr<GradientCopies> gradient_copies_;  // null without an accelerator
  std::unique_ptr<engine::Updater> updater_;         // after the stream: it writes into its weights
  bool in_memory_ = false;                           // optimizer.where = "memory"
  base::DataType gradient_type_ = base::DataType::kBf16;
  engine::UpdaterTraffic traffic_;
  double waited_s_ = 0;             // for commits, since the report before
  double update_after_step_s_ = 0;  // of the step before, where it follows the report

  // The step in progress.
  bool begun_ = false;                               // at the updater
  std::vector<UnitPass::Gradient> gradients_ready_;  // that go down next
  Overlap overlap_ = Overlap::kNone;                 // of this step; never kAuto
  double norm_before_ = 0;                           // of the last step; 0: there was none
  double late_exposed_ = 0;  // share of the last late step that was waited for

  // Null before the first step that asks for it.
  std::unique_ptr<LayerStats> layer_stats_;
  bool measures_layers_ = false;  // in this step

  base::StepNumber first_ = 0;  // what training began from
  base::StepNumber step_ = 0;
  Position position_;
  RunRecord record_;                  // of the state on devices
  std::vector<std::string> remarks_;  // on the log, and on what was planned and is not done
  uint32_t skips_in_a_row_ = 0;
  std::optional<double> best_loss_;  // of the copy that keep_best() made
};

}  // namespace smartinf::train
