#include "smartinf/train/distill/block_trainer.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/autograd.h>

#include "smartinf/base/clock.h"
#include "smartinf/train/lr_schedule.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

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

BlockTrainer::BlockTrainer(const Options& options, std::unique_ptr<engine::Updater> updater,
                           uint64_t elements)
    : options_(options),
      weights_N_(
          torch::empty({static_cast<int64_t>(elements)}, torch::dtype(scalar_type(options.type)))),
      updater_(std::move(updater)) {}

engine::WeightsSink BlockTrainer::sink() const {
  auto* const begin = static_cast<std::byte*>(weights_N_.data_ptr());
  const uint64_t bytes = base::data_type_bytes(options_.type);
  return [begin, bytes](uint64_t first) { return begin + first * bytes; };
}

Result<std::unique_ptr<BlockTrainer>> BlockTrainer::open(const Options& options,
                                                         const LayeredModel& student,
                                                         uint32_t block) {
  const plan::Unit layer = student.layer_span(block);
  const plan::ParameterSpace space = space_of_block(options.parameters.space, layer);
  SI_ASSIGN_OR_RETURN(std::unique_ptr<engine::Updater> updater,
                      engine::Updater::open(options_of_block(options.updater, block), space));
  const std::string metadata =
      nlohmann::ordered_json{{"distill", options.identity}, {"block", block}}.dump();
  if (updater->fresh()) {
    SI_RETURN_IF_ERROR(updater->initialize(
        [&](uint64_t first, std::span<float> out) {
          return student.files().read(layer.first + first, out);
        },
        metadata));
  } else if (updater->client_metadata() != metadata) {
    return Status(
        ErrorCode::kMismatch, "the store of this block belongs to another run of smartinf distill",
        "Name that run's folder as train.run with its options, or other devices",
        base::ErrorPlace{options_of_block(options.updater, block).devices.front().path, {}, {}, 0});
  }
  std::unique_ptr<BlockTrainer> made(new BlockTrainer(options, std::move(updater), layer.count));
  made->metadata_ = metadata;
  made->step_ = made->updater_->committed_step();
  SI_RETURN_IF_ERROR(made->updater_->load_weights(options.type, made->sink()));
  made->part_.emplace(student.layer(block, made->weights_N_.to(options.device)));
  made->traffic_ = made->updater_->traffic();
  return made;
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
  std::vector<Tensor> sums;
  for (const Sample& sample : samples) {
    const uint64_t forward_ns = base::now_ns();
    const Tensor y_BTC = part_->run(sample.input_BTC, sample.documents);
    Tensor loss;
    Tensor gradient;
    Tensor output = y_BTC;
    if (sample.logits != nullptr) {
      HeadLoss made = head_divergence(*head, y_BTC, *sample.logits);
      loss = std::move(made.loss);
      gradient = std::move(made.gradient_BTC);
    } else {
      output = loss = block_loss(options_.loss, y_BTC, sample.target_BTC);
      gradient = torch::ones_like(loss);
    }
    report.loss += loss.item<double>() / static_cast<double>(samples.size());
    report.tokens += static_cast<uint64_t>(y_BTC.size(0) * y_BTC.size(1));
    const uint64_t backward_ns = base::now_ns();
    report.forward_s += static_cast<double>(backward_ns - forward_ns) * 1e-9;
    auto made = torch::autograd::grad({output}, leaves, {gradient}, /*retain_graph=*/std::nullopt,
                                      /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < made.size(); ++i) {
      // The gradient of an expert that no token went through.
      Tensor more = made[i].defined() ? made[i] : torch::zeros_like(leaves[i]);
      if (sums.size() < made.size()) {
        sums.push_back(samples.size() == 1 ? std::move(more) : more.to(torch::kFloat32));
      } else {
        sums[i] += more;
      }
    }
    report.backward_s += base::seconds_since(backward_ns);
  }
  report.targets = report.tokens;

  SI_RETURN_IF_ERROR(updater_->begin_step());
  for (size_t i = sums.size(); i-- > 0;) {
    const Tensor values =
        sums[i].to(torch::kCPU, scalar_type(options_.updater.gradient_type)).contiguous();
    SI_RETURN_IF_ERROR(updater_->put_gradient(
        part_->weights[i].first - part_->weights.front().first, values.const_data_ptr(),
        options_.updater.gradient_type, static_cast<uint64_t>(values.numel())));
  }
  const double unscale = 1.0 / static_cast<double>(samples.size());
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
    update.groups.push_back(
        {.lr = report.lr * group.lr_factor, .weight_decay = group.weight_decay});
  }
  SI_RETURN_IF_ERROR(updater_->start_update(update, options_.type, sink()));
  SI_RETURN_IF_ERROR(updater_->wait_weights(0, static_cast<uint64_t>(weights_N_.numel())));
  SI_RETURN_IF_ERROR(updater_->start_commit(metadata_));
  ++step_;
  if (!options_.device.is_cpu()) {
    // In place: leaves are views of one tensor there.
    const torch::NoGradGuard no_grad;
    int64_t first = 0;
    for (Tensor& leaf : leaves) {
      leaf.copy_(weights_N_.narrow(0, first, leaf.numel()).view(leaf.sizes()));
      first += leaf.numel();
    }
  }
  report.seconds = base::seconds_since(begin_ns);
  report.update_s = report.seconds - report.forward_s - report.backward_s;
  const engine::UpdaterTraffic now = updater_->traffic();
  report.traffic = now.since(std::exchange(traffic_, now));
  return report;
}

}  // namespace smartinf::train
