// The trainer: model, data and an updater, one step at a time. Needs torch to link, not to include.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/options.h"
#include "smartinf/plan/training_memory.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/options.h"
#include "smartinf/train/ranks/ranks.h"
#include "smartinf/train/run_choice.h"
#include "smartinf/train/step_report.h"

namespace smartinf::train {

/// Everything that a run is. The recipe's text is kept in the run's folder.
struct Job {
  Options options;
  engine::UpdaterOptions updater;  // with optimizer.where = "memory" only its rule is looked at
  std::string recipe;
  RunChoice choice;  // of a state on the devices that the run's folder does not know
  engine::StateProgress progress = {};  // of the first weights; a failure that it returns ends it
  /// Ranks of the run. Where there are several, every rank has the same job, and every call of its
  /// trainer is made by all of them in the same order. updater.devices have their ranks
  /// (devices_of_ranks). Rank 0 has the run's folder; the others do not look at it.
  Ranks ranks = {};
  /// A file (StoredLogits) of a teacher's logits of the run's micro batches, from which the loss is
  /// the divergence. Empty: the loss is that of the data's tokens.
  std::string teacher_logits = {};
  /// For tests: instead of what plan_run() finds.
  std::optional<plan::TrainingPlan> plan = {};
};

/// Means over targets that count, in nats per token.
struct Validation {
  std::optional<double> loss;  // over data held out; none: none is held out
  struct Named {
    std::string name;
    double loss = 0;
  };
  std::vector<Named> sets;  // of data.evaluation
  /// One line of JSON without a newline.
  std::string to_json(base::StepNumber step) const;
};

/// Threads: one caller. Errors: as values; what torch throws is caught and named.
class Trainer {
 public:
  /// Locks the run's folder, reads the data, opens the state or creates it, and stands at the last
  /// committed step. A state on the devices that is not of this run's folder is refused before
  /// anything is written. The folder is not changed when there is no step left to train. Errors:
  /// whatever a user can get wrong; each names the key, file or device.
  static base::Result<std::unique_ptr<Trainer>> open(const Job& job);
  /// Describes what of the run would be in memory, in lines for people; nothing is opened or
  /// written. Errors: as open(), of options, data and memory.
  static base::Result<std::vector<std::string>> describe_memory(const Job& job);
  virtual ~Trainer() = default;

  /// With all defaults filled in.
  virtual const Options& options() const = 0;
  /// Updates done. The last one's commit may still be under way.
  virtual base::StepNumber step() const = 0;

  /// One optimizer step, logged in the run's folder. The commit goes on behind the next forward: a
  /// crash may cost the step of the last report.
  /// Errors: kCancelled when `stop` was requested before the gradients were complete (nothing has
  /// changed then), and on several ranks when it was on any of them before the step began. Where
  /// the residual of compressed gradients was not written with the last step, this one is finished
  /// first, and writes it; the call after it is cancelled. Else the step is lost and the committed
  /// ones stand.
  virtual base::Result<StepReport> train_step(std::stop_token stop) = 0;
  /// Keeps a copy of the state at step(), after waiting for its commit, and deletes older ones
  /// (options().checkpoint); logged in the run's folder. Training goes on with the same losses,
  /// made or not: nothing is returned for one that could not be made, of which a warning says why.
  /// Errors: kCancelled by `progress`; kCorrupt for a damaged block; of the commit.
  virtual base::Result<std::optional<engine::CheckpointSummary>> checkpoint(
      const engine::StateProgress& progress) = 0;
  /// With train.keep_best, and a loss (of validate()) below that of the copy which is there: keeps
  /// a copy of the state at step() in the folder "best" of options().checkpoint.folder, and deletes
  /// the one before. Else, and where a copy could not be made, nothing. Errors: of checkpoint().
  virtual base::Result<std::optional<engine::CheckpointSummary>> keep_best(
      double loss, const engine::StateProgress& progress) = 0;
  /// Losses on data that is not trained on, logged. Errors: kFailedPrecondition for data of which
  /// no token counts.
  virtual base::Result<Validation> validate() = 0;
  /// How text becomes the model's tokens.
  virtual TextForm text_form() const = 0;
  /// Up to train.sample_tokens that the model puts behind each prompt, which together are not
  /// longer than data.sequence. prompts: not empty, tokens below the vocabulary; of several ranks
  /// rank 0's count, and it alone gets samples. Errors: kCancelled.
  virtual base::Result<std::vector<std::vector<int64_t>>> sample(
      std::span<const std::vector<int64_t>> prompts, std::stop_token stop) = 0;
  /// Waits until the last step is committed, and in memory mode saves it. To be called at the end.
  /// Returns what the last step moved after its report: the commit's part.
  virtual base::Result<engine::UpdaterTraffic> finish() = 0;

  /// Lines for people: model, data, devices.
  virtual std::vector<std::string> describe() const = 0;
};

}  // namespace smartinf::train
