#include "smartinf/train/distill/block_trainer.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/autograd.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"
#include "smartinf/train/gradient_tree.h"
#include "smartinf/train/lr_schedule.h"
#include "smartinf/train/ranks/device_ranks.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

namespace {

constexpr const char* kNearest = "rounded_to_nearest";
constexpr double kOffsetRate = 5;  // times train.lr: the learning rate of offsets and cuts

}  // namespace

engine::UpdaterOptions options_of_block(engine::UpdaterOptions options, uint32_t block) {
  for (engine::DeviceOptions& device : options.devices) {
    device.path += fmt::format("/block-{:03}", block);
  }
  return options;
}

plan::ParameterSpace space_of_block(const plan::ParameterSpace& space, const plan::Unit& layer) {
  plan::ParameterSpace of_block;
  for (const plan::ParameterRange& range : space.ranges()) {
    if (range.first < layer.first || range.first >= layer.end()) continue;
    throw_if_error(of_block.add(range.name, range.shape, range.group));
  }
  return of_block;
}

bool rounded_to_nearest(const std::string& client_metadata) {
  return nlohmann::json::parse(client_metadata).value(kNearest, false);
}

BlockTrainer::BlockTrainer(const Options& options, std::unique_ptr<engine::Updater> updater,
                           std::optional<Rounding> rounding, uint64_t elements)
    : options_(options),
      mine_(plan::micro_batches_of(options.train.accumulation, options.ranks.rank(),
                                   options.ranks.world())),
      updater_(std::move(updater)),
      rounding_(std::move(rounding)) {
  trained_N_ =
      torch::empty({static_cast<int64_t>(elements)}, torch::dtype(scalar_type(trained_type())));
}

engine::WeightsSink BlockTrainer::sink() const {
  auto* const begin = static_cast<std::byte*>(trained_N_.data_ptr());
  const uint64_t bytes = base::data_type_bytes(trained_type());
  return [begin, bytes](uint64_t first) { return begin + first * bytes; };
}

Result<std::unique_ptr<BlockTrainer>> BlockTrainer::open(const Options& options,
                                                         const LayeredModel& student,
                                                         uint32_t block) {
  const plan::Unit layer = student.layer_span(block);
  std::optional<Rounding> rounding;
  if (options.exact != nullptr) {
    SI_ASSIGN_OR_RETURN(rounding, Rounding::of(*options.exact, block, options.group));
  }
  const plan::ParameterSpace space =
      rounding ? rounding->space() : space_of_block(options.parameters.space, layer);
  engine::UpdaterOptions of_block = options_of_block(options.updater, block);
  if (!options.ranks.alone()) {
    of_block.collectives = options.ranks.collectives();
    for (engine::DeviceOptions& device : of_block.devices) device.rank = engine::kAnyRank;
    SI_ASSIGN_OR_RETURN(of_block.devices,
                        share_out_devices(std::move(of_block.devices), options.ranks.world()));
  }
  SI_ASSIGN_OR_RETURN(std::unique_ptr<engine::Updater> updater,
                      engine::Updater::open(of_block, space));
  nlohmann::ordered_json metadata{{"distill", options.identity}, {"block", block}};
  const std::string text = metadata.dump();
  metadata[kNearest] = true;
  if (updater->fresh()) {
    SI_RETURN_IF_ERROR(updater->initialize(
        [&](uint64_t first, std::span<float> out) {
          if (!rounding) return student.files().read(layer.first + first, out);
          std::ranges::fill(out, 0.0f);
          return Status();
        },
        text));
  } else if (updater->client_metadata() != text && updater->client_metadata() != metadata.dump()) {
    return Status(ErrorCode::kMismatch,
                  "the store of this block belongs to another run of smartinf distill",
                  "Name that run's folder as train.run with its options, or other devices",
                  base::ErrorPlace{of_block.devices.front().path, {}, {}, 0});
  }
  std::unique_ptr<BlockTrainer> made(
      new BlockTrainer(options, std::move(updater), std::move(rounding), space.count()));
  made->metadata_ = text;
  made->step_ = made->updater_->committed_step();
  made->nearest_ = rounded_to_nearest(made->updater_->client_metadata());
  SI_RETURN_IF_ERROR(made->updater_->load_weights(made->trained_type(), made->sink()));
  made->weights_N_ = made->trained_N_;
  if (made->rounding_) {
    made->weights_N_ =
        torch::empty({static_cast<int64_t>(layer.count)}, torch::dtype(scalar_type(options.type)));
  }
  made->weights_N_ = made->weights_N_.to(options.device);
  if (made->rounding_) made->use_weights();
  made->part_.emplace(student.layer(block, made->weights_N_));
  made->traffic_ = made->updater_->traffic();
  return made;
}

/// Puts the update's weights where the layer computes with them.
void BlockTrainer::use_weights() {
  const torch::NoGradGuard no_grad;
  Tensor weights_N = weights_N_.variable_data();  // leaves are views of it, of which autograd knows
  if (rounding_) {
    const Tensor trained = trained_N_.to(options_.device);
    rounding_->put_weights(nearest_ ? torch::zeros_like(trained) : trained, weights_N);
  } else if (!options_.device.is_cpu()) {
    weights_N.copy_(trained_N_);
  }
}

BlockTrainer::Computed BlockTrainer::compute(const Sample& sample,
                                             const LayeredModel::Head* head) const {
  const Tensor y_BTC = part_->run(sample.input_BTC, sample.documents);
  if (sample.logits == nullptr) {
    const Tensor loss = block_loss(options_.loss, y_BTC, sample.target_BTC);
    return {loss, loss, torch::ones_like(loss)};
  }
  HeadLoss made = head_divergence(*head, y_BTC, *sample.logits);
  return {std::move(made.loss), y_BTC, std::move(made.gradient_BTC)};
}

/// The gradient of a micro batch by a parameter of the layer, as that by what is trained of it.
std::vector<BlockTrainer::Gradient> BlockTrainer::gradients_of(const Parameter& parameter,
                                                               const Tensor& gradient) {
  const uint64_t first = parameter.first - part_->weights.front().first;
  if (!rounding_) return {{first, gradient}};
  std::vector<Gradient> made;
  const Tensor trained = trained_N_.to(options_.device);
  int64_t row = 0;  // matrices that are used as one lie one after the other
  for (const Rounding::Matrix& matrix : rounding_->matrices()) {
    if (matrix.first < first || matrix.first >= first + static_cast<uint64_t>(gradient.numel())) {
      continue;
    }
    auto of_matrix = rounding_->gradient(matrix, trained, gradient.narrow(0, row, matrix.rows));
    made.push_back({static_cast<uint64_t>(matrix.offsets), std::move(of_matrix.offsets_RC)});
    made.push_back({static_cast<uint64_t>(matrix.cuts), std::move(of_matrix.cuts_RG)});
    row += matrix.rows;
  }
  return made;
}

/// sums: of this rank's nodes of the tree.
Status BlockTrainer::put_sums(uint64_t first, std::vector<Tensor> sums) {
  engine::GradientSums of_rank;
  of_rank.micro_batches = options_.train.accumulation;
  of_rank.type = trained_type();
  const auto nodes = plan::summation_nodes(of_rank.micro_batches, mine_);
  std::vector<const void*> values;
  for (size_t i = 0; i < sums.size(); ++i) {
    const base::DataType type = nodes[i].size() == 1 ? of_rank.type : base::DataType::kF32;
    sums[i] = sums[i].to(torch::kCPU, scalar_type(type)).contiguous();
    values.push_back(sums[i].const_data_ptr());
  }
  of_rank.nodes = values;
  return updater_->put_gradient_sums(first, static_cast<uint64_t>(sums.front().numel()), of_rank);
}

/// Of a step's micro batches, of which this rank has these.
Result<double> BlockTrainer::mean_loss(std::vector<double> mine) const {
  const uint64_t count = options_.train.accumulation;
  const uint32_t world = options_.ranks.world();
  const uint64_t most = base::divide_up(count, world);
  mine.resize(most);
  SI_ASSIGN_OR_RETURN(const auto all, options_.ranks.all<double>(mine));
  double mean = 0;
  for (uint32_t rank = 0; rank < world; ++rank) {
    const uint64_t of_rank = plan::micro_batches_of(count, rank, world).size();
    for (uint64_t i = 0; i < of_rank; ++i) {
      mean += all[rank * most + i] / static_cast<double>(count);
    }
  }
  return mean;
}

/// Compares the trained rounding with the nearest one, and leaves the layer with the better.
Status BlockTrainer::judge(std::span<const Sample> samples, const LayeredModel::Head* head) {
  std::array<double, 2> losses{};  // trained, to nearest
  for (const bool nearest : {false, true}) {
    nearest_ = nearest;
    use_weights();
    std::vector<double> mine;
    for (const Sample& sample : samples) {
      mine.push_back(compute(sample, head).loss.item<double>());
    }
    SI_ASSIGN_OR_RETURN(losses[size_t{nearest}], mean_loss(std::move(mine)));
  }
  nearest_ = !(losses[0] <= losses[1]);
  use_weights();
  if (!nearest_) return Status();
  auto metadata = nlohmann::ordered_json::parse(metadata_);
  metadata[kNearest] = true;
  metadata_ = metadata.dump();
  return Status();
}

Result<StepReport> BlockTrainer::train(std::span<const Sample> samples,
                                       const LayeredModel::Head* head) {
  const torch::AutoGradMode mode(true);
  const uint64_t begin_ns = base::now_ns();
  StepReport report;
  report.step = step_ + 1;
  report.lr = learning_rate(options_.train, report.step);
  report.began_s = base::seconds_since_1970();
  std::vector<Tensor> leaves;
  for (const Parameter& parameter : part_->weights) leaves.push_back(parameter.weight);
  struct Sum {
    uint64_t first = 0;
    GradientTree tree;
  };
  std::vector<Sum> sums;  // of each span that is trained
  std::vector<double> losses;
  for (const Sample& sample : samples) {
    const uint64_t forward_ns = base::now_ns();
    const Computed computed = compute(sample, head);
    losses.push_back(computed.loss.item<double>());
    const auto size = static_cast<uint64_t>(sample.input_BTC.size(0) * sample.input_BTC.size(1));
    report.tokens = size * options_.train.accumulation;
    const uint64_t backward_ns = base::now_ns();
    report.forward_s += static_cast<double>(backward_ns - forward_ns) * 1e-9;
    auto made = torch::autograd::grad({computed.output}, leaves, {computed.gradient},
                                      /*retain_graph=*/std::nullopt,
                                      /*create_graph=*/false, /*allow_unused=*/true);
    size_t next = 0;
    for (size_t i = made.size(); i-- > 0; made[i] = Tensor()) {
      // The gradient of an expert that no token went through.
      if (!made[i].defined()) made[i] = torch::zeros_like(leaves[i]);
      for (Gradient& gradient : gradients_of(part_->weights[i], made[i])) {
        if (next == sums.size()) {
          sums.push_back({gradient.first, GradientTree(options_.train.accumulation, mine_)});
        }
        sums[next++].tree.add(std::move(gradient.values));
      }
    }
    report.backward_s += base::seconds_since(backward_ns);
  }
  report.targets = report.tokens;
  SI_ASSIGN_OR_RETURN(report.loss, mean_loss(std::move(losses)));

  SI_RETURN_IF_ERROR(updater_->begin_step());
  for (Sum& sum : sums) SI_RETURN_IF_ERROR(put_sums(sum.first, sum.tree.take()));
  const double unscale = 1.0 / static_cast<double>(options_.train.accumulation);
  SI_ASSIGN_OR_RETURN(const engine::GradientSummary summary, updater_->finish_gradients(unscale));
  report.gradient_norm = summary.norm;
  if (!summary.finite) {
    SI_RETURN_IF_ERROR(updater_->abort());
    return Status(
        ErrorCode::kFailedPrecondition,
        fmt::format("step {}: the gradient of {} is not finite", report.step, summary.first_bad),
        "Lower train.lr, or set train.precision = \"f32\"");
  }
  engine::UpdateOptions update;
  update.gradient_scale = unscale * engine::clip_factor(summary.norm, options_.train.clip_norm);
  for (const ParameterGroup& group : options_.parameters.groups) {
    update.groups.push_back({.lr = report.lr * group.lr_factor * (rounding_ ? kOffsetRate : 1),
                             .weight_decay = group.weight_decay});
  }
  SI_RETURN_IF_ERROR(updater_->start_update(update, trained_type(), sink()));
  SI_RETURN_IF_ERROR(updater_->wait_weights(0, static_cast<uint64_t>(trained_N_.numel())));
  use_weights();
  if (rounding_ && report.step == options_.train.steps) {
    SI_RETURN_IF_ERROR(judge(samples, head));
  }
  SI_RETURN_IF_ERROR(updater_->start_commit(metadata_));
  ++step_;
  report.seconds = base::seconds_since(begin_ns);
  report.update_s = report.seconds - report.forward_s - report.backward_s;
  const engine::UpdaterTraffic now = updater_->traffic();
  report.traffic = now.since(std::exchange(traffic_, now));
  return report;
}

}  // namespace smartinf::train
