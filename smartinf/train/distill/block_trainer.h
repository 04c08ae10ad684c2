// One block of a student in training: its state in a store of its own on the devices, its weights
// where it computes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torch/types.h>

#include "smartinf/base/status.h"
#include "smartinf/engine/updater.h"
#include "smartinf/plan/micro_batches.h"
#include "smartinf/train/distill/layered_model.h"
#include "smartinf/train/distill/losses.h"
#include "smartinf/train/distill/rounding.h"
#include "smartinf/train/options.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/ranks/ranks.h"
#include "smartinf/train/step_report.h"

namespace smartinf::train {

/// The devices' folders for this block's store.
engine::UpdaterOptions options_of_block(engine::UpdaterOptions options, uint32_t block);

/// Ranges of a layer, from element 0 on. Of a space of groups: theirs.
plan::ParameterSpace space_of_block(const plan::ParameterSpace& space, const plan::Unit& layer);

/// What a block's store says of the rounding that it ends with.
bool rounded_to_nearest(const std::string& client_metadata);

/// Threads: one caller. Errors: as StatusError where nothing is returned; torch throws.
class BlockTrainer {
 public:
  struct Options {
    const TrainOptions& train;
    const engine::UpdaterOptions& updater;  // of the run; the block's follow
    const GroupedParameters& parameters;    // of the student
    BlockLoss loss = BlockLoss::kMse;
    base::DataType type = base::DataType::kF32;  // of weights and activations
    torch::Device device;
    std::string identity;  // of the run; a store of another run is refused
    /// Of a student whose matrices are rounded: whose layers they are before, and in groups of so
    /// many. The store then has what decides how they are rounded.
    const LayeredModel* exact = nullptr;
    uint32_t group = 0;
    /// That share the block: each has its micro batches of a step (plan::micro_batches_of) and some
    /// of the devices. All make the same calls, in the same order.
    Ranks ranks;
  };
  /// Opens the block's store, or makes it of the student's weights. All that is referred to
  /// outlives it. Errors: the devices'; kMismatch for another run's store.
  static base::Result<std::unique_ptr<BlockTrainer>> open(const Options& options,
                                                          const LayeredModel& student,
                                                          uint32_t block);
  ~BlockTrainer() { static_cast<void>(updater_->wait_commit()); }

  /// Updates that are committed, or will be with the commit under way.
  base::StepNumber step() const { return step_; }
  const ModelPart& part() const { return *part_; }

  /// A micro batch of a step that this rank has.
  struct Sample {
    torch::Tensor input_BTC;
    const DocumentEnds& documents;
    torch::Tensor target_BTC;           // of the output, or
    const TopLogits* logits = nullptr;  // of the head behind it
  };
  /// Makes the next step of the ranks' samples, whose losses are averaged, and whose gradients are
  /// added by plan/micro_batches.h's tree. head: where samples have logits. The
  /// commit goes on behind the next step. Errors: the devices'; kFailedPrecondition for a gradient
  /// that is not finite. A rounded block judges with its last step whether it does better than
  /// rounded to nearest on the samples; where it does not, its weights are these.
  base::Result<StepReport> train(std::span<const Sample> samples, const LayeredModel::Head* head);
  /// Waits for the commit.
  base::Status finish() { return updater_->flush(); }

 private:
  BlockTrainer(const Options& options, std::unique_ptr<engine::Updater> updater,
               std::optional<Rounding> rounding, uint64_t elements);
  engine::WeightsSink sink() const;
  base::DataType trained_type() const { return rounding_ ? base::DataType::kF32 : options_.type; }
  struct Computed {
    torch::Tensor loss;
    torch::Tensor output;  // whose gradient is:
    torch::Tensor gradient;
  };
  Computed compute(const Sample& sample, const LayeredModel::Head* head) const;
  /// What is trained: gradients of these elements, from `first` on.
  struct Gradient {
    uint64_t first = 0;
    torch::Tensor values;
  };
  std::vector<Gradient> gradients_of(const Parameter& parameter, const torch::Tensor& gradient);
  base::Status put_sums(uint64_t first, std::vector<torch::Tensor> sums);
  base::Result<double> mean_loss(std::vector<double> mine) const;
  void use_weights();
  base::Status judge(std::span<const Sample> samples, const LayeredModel::Head* head);

  const Options options_;
  const plan::MicroBatchRange mine_;  // of a step's
  torch::Tensor trained_N_;  // in the host's memory: where updates arrive
  torch::Tensor weights_N_;  // of the layer, where it computes
  std::unique_ptr<engine::Updater> updater_;
  std::optional<Rounding> rounding_;
  std::optional<ModelPart> part_;
  base::StepNumber step_ = 0;
  bool nearest_ = false;  // a rounded block is rounded to nearest
  std::string metadata_;
  engine::UpdaterTraffic traffic_;
};

}  // namespace smartinf::train
