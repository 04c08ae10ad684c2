#include "smartinf/train/torch_trainer.h"

#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/early_update_pays.h"
#include "smartinf/train/lr_schedule.h"
#include "smartinf/train/product_rate.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/window_order.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

Result<StepReport> TorchTrainer::train_step(std::stop_token stop) {
  return together("training step", [&]() -> Result<StepReport> {
    StepReport report;
    report.step = step_ + 1;
    report.lr = learning_rate(options_.train, report.step);
    report.began_s = base::seconds_since_1970();
    SI_RETURN_IF_ERROR(begin_layer_stats());
    const uint64_t begin_ns = base::now_ns();
    const double waited_s = waited_for_weights_s();
    const uint64_t first_window = position_.windows;
    const auto read = next_batches(stop, report.targets);
    if (read.status().code() == ErrorCode::kCancelled) position_.windows = first_window;
    SI_RETURN_IF_ERROR(read.status());
    if (report.targets == 0) {
      return pass_over(std::move(report), "no token of its batches counts as a target",
                       "Make train.micro_batch or train.accumulation larger, or leave out data "
                       "that no loss_mask counts");
    }
    const Status computed = compute_gradients(*read, stop, report);
    if (computed.code() == ErrorCode::kCancelled) position_.windows = first_window;
    SI_RETURN_IF_ERROR(computed);

    const uint64_t update_ns = base::now_ns();
    if (!begun_) SI_RETURN_IF_ERROR(begin_step());  // the one before is committed now
    SI_RETURN_IF_ERROR(put_gradients(/*all=*/true));
    begun_ = false;
    SI_ASSIGN_OR_RETURN(const engine::GradientSummary summary,
                        updater_->finish_gradients(1.0 / options_.train.accumulation));
    report.gradient_norm = summary.norm;
    if (!summary.finite) return skip(std::move(report), summary.first_bad);
    SI_RETURN_IF_ERROR(update(summary));
    report.overlap = base::enum_name(overlap_);
    report.wrong_guess = overlap_ == Overlap::kEarly && clip_factor(summary) != 1;
    norm_before_ = summary.norm;
    ++step_;
    skips_in_a_row_ = 0;
    const uint64_t end_ns = base::now_ns();

    const double update_before_s = std::exchange(update_after_step_s_, 0);
    report.seconds = static_cast<double>(end_ns - begin_ns) * 1e-9 + update_before_s;
    report.update_s = report.seconds - report.forward_s - report.backward_s;
    report.exposed_s =
        std::exchange(waited_s_, 0) + waited_for_weights_s() - waited_s + update_before_s;
    if (overlap_ == Overlap::kLate) late_exposed_ = report.exposed_s / report.seconds;
    report.phases.push_back({"update", update_ns, end_ns});
    report_traffic(report);
    choose_offload(report);
    // Before the commit: a line too many is cut when the run goes on, one that a crash kept from
    // being written would stay missing.
    folder_.append_log(report.to_json());
    if (must_write_residual(stop)) {
      updater_->compression()->write_residual();
      residual_written_ = step_;
    }
    SI_RETURN_IF_ERROR(updater_->start_commit(position_.to_json()));
    // An update waits for the forward that asks for its weights.
    if (updates_follow_forward() && overlap_ == Overlap::kNone) {
      const uint64_t commit_ns = base::now_ns();
      SI_RETURN_IF_ERROR(updater_->wait_commit());
      update_after_step_s_ = base::seconds_since(commit_ns);
    }
    if (in_memory_ && step_ % options_.train.save_every == 0) {
      SI_RETURN_IF_ERROR(updater_->flush());
    }
    SI_RETURN_IF_ERROR(end_layer_stats());
    return report;
  });
}

// Weights are read from where the state is, which has all of them in f32: in memory some may be
// missing, and bf16 hides small updates. This waits for commits, and changes nothing else.
Status TorchTrainer::begin_layer_stats() {
  const uint64_t every = options_.train.layer_stats_every;
  measures_layers_ = every != 0 && (step_ + 1) % every == 0;
  if (!measures_layers_) return Status();
  if (layer_stats_ == nullptr) layer_stats_ = std::make_unique<LayerStats>(space_);
  layer_stats_->begin();
  SI_RETURN_IF_ERROR(trained_->wait_all());
  return updater_->read_weights([this](uint64_t first, std::span<const float> weights) {
    layer_stats_->add_weights(first, weights);
    return Status();
  });
}

Status TorchTrainer::end_layer_stats() {
  if (!measures_layers_) return Status();
  SI_RETURN_IF_ERROR(trained_->wait_all());
  SI_RETURN_IF_ERROR(updater_->read_weights([this](uint64_t first, std::span<const float> weights) {
    layer_stats_->add_updated_weights(first, weights);
    return Status();
  }));
  folder_.append_log(layer_stats_->to_json(step_, 1.0 / options_.train.accumulation));
  return Status();
}

Status TorchTrainer::compute_gradients(std::span<const Batch> batches, const std::stop_token& stop,
                                       StepReport& report) {
  const TrainOptions& train = options_.train;
  const auto accumulation = static_cast<double>(train.accumulation);
  report.tokens = uint64_t{train.accumulation} * train.micro_batch * options_.data.sequence;
  UnitPass::Options pass;
  pass.targets_per_batch = static_cast<double>(report.targets) / accumulation;
  pass.before_unit = [&] {
    // Several ranks stop before a step alone, together.
    if (!stop.stop_requested() || residual_lags() || !ranks_.alone()) return;
    throw StatusError(Status(ErrorCode::kCancelled, "stopped before the step was complete"));
  };
  pass.micro_batches = train.accumulation;
  pass.mine = mine_;
  pass.by_tree = !ranks_.alone() || options_.ranks.order == SumOrder::kFixed;
  pass.take_gradient = [this](UnitPass::Gradient gradient) { take_gradient(std::move(gradient)); };
  // Where units do not stay, each of them does all micro batches before the next one comes.
  const size_t at_once = plan_.streams ? batches.size() : 1;
  std::vector<double> losses;
  for (size_t i = 0; i < batches.size(); i += at_once) {
    const std::span<const Batch> together = batches.subspan(i, at_once);
    const uint64_t forward_ns = base::now_ns();
    const double waited_s = waited_for_weights_s();
    pass.first = mine_.begin + i;
    pass.times_forward = offload_choice_ && !offload_choice_->decided();
    for (const double loss : pass_->train(together, pass)) losses.push_back(loss);
    const uint64_t backward_ns = pass_->backward_began_ns();
    const uint64_t end_ns = base::now_ns();

    report.forward_s +=
        static_cast<double>(backward_ns - forward_ns) * 1e-9 - (waited_for_weights_s() - waited_s);
    report.backward_s += static_cast<double>(end_ns - backward_ns) * 1e-9;
    report.phases.push_back({"forward", forward_ns, backward_ns});
    report.phases.push_back({"backward", backward_ns, end_ns});
  }
  SI_ASSIGN_OR_RETURN(losses, losses_of_all(losses));
  for (const double loss : losses) report.loss += loss / accumulation;
  return Status();
}

// The residual goes to the devices within a step only: a run that is interrupted between two steps
// that write it makes one more step, so that it resumes with the same bits.
bool TorchTrainer::residual_lags() const {
  if (residual_every_ == 0 || step_ == residual_written_) return false;
  return step_ % residual_every_ != 0;
}

bool TorchTrainer::must_write_residual(const std::stop_token& stop) const {
  const uint64_t every = options_.checkpoint.every;
  const uint64_t validate_every = options_.train.keep_best ? options_.train.validate_every : 0;
  const bool checkpoint_comes =
      (every != 0 && step_ % every == 0) || (validate_every != 0 && step_ % validate_every == 0);
  return residual_every_ != 0 &&
         (step_ == options_.train.steps || checkpoint_comes || stop.stop_requested());
}

// While the commit of the step before goes on they wait here, and backward does not; but not
// where there is no memory for them.
void TorchTrainer::take_gradient(UnitPass::Gradient gradient) {
  if (measures_layers_) layer_stats_->add_gradient(gradient.first, gradient.sums.front());
  gradients_ready_.push_back(std::move(gradient));
  // Several ranks begin at the same gradient, whoever's commit ends first.
  if (!begun_ && !plan_.streams && ranks_.alone() && updater_->committing()) return;
  if (!begun_) throw_if_error(begin_step());
  throw_if_error(put_gradients(/*all=*/false));
}

Status TorchTrainer::begin_step() {
  const uint64_t begin_ns = base::now_ns();
  SI_RETURN_IF_ERROR(updater_->begin_step());
  waited_s_ += base::seconds_since(begin_ns);
  begun_ = true;
  overlap_ = overlap_of_next_step();
  if (overlap_ != Overlap::kEarly) return Status();
  const TrainOptions& train = options_.train;
  return updater_->start_early_update(update_options(1), weights_type_, weights_sink(),
                                      train.clip_norm * train.accumulation);
}

Overlap TorchTrainer::overlap_of_next_step() const {
  const TrainOptions& train = options_.train;
  if (in_memory_ || train.overlap == Overlap::kNone) return Overlap::kNone;
  if (train.overlap == Overlap::kEarly) return Overlap::kEarly;
  const bool last = step_ + 1 == train.steps;  // nothing is computed behind it
  if (train.overlap == Overlap::kAuto &&
      engine::early_update_pays(norm_before_, train.clip_norm, late_exposed_, last) &&
      updater_->early_update_possible().ok()) {
    return Overlap::kEarly;
  }
  return last ? Overlap::kNone : Overlap::kLate;
}

// In the order in which backward makes them; each gradient is freed once it is down. From an
// accelerator one is copied while the one before it goes down and backward goes on.
Status TorchTrainer::put_gradients(bool all) {
  if (!ranks_.alone()) return put_sums();
  const torch::ScalarType type = scalar_type(gradient_type_);
  for (UnitPass::Gradient& gradient : std::exchange(gradients_ready_, {})) {
    const Tensor values = std::exchange(gradient.sums.front(), {}).to(type).contiguous();
    if (gradient_copies_ == nullptr) {
      SI_RETURN_IF_ERROR(updater_->put_gradient(gradient.first, values.const_data_ptr(),
                                                gradient_type_,
                                                static_cast<uint64_t>(values.numel())));
      continue;
    }
    gradient_copies_->start(gradient.first, values);
    if (gradient_copies_->full()) SI_RETURN_IF_ERROR(put_oldest_copy());
  }
  while (all && gradient_copies_ != nullptr && !gradient_copies_->empty()) {
    SI_RETURN_IF_ERROR(put_oldest_copy());
  }
  return Status();
}

Status TorchTrainer::put_oldest_copy() {
  const GradientCopies::Copied copied = gradient_copies_->next();
  return updater_->put_gradient(copied.first, copied.values, gradient_type_, copied.count);
}

double TorchTrainer::clip_factor(const engine::GradientSummary& summary) const {
  return engine::clip_factor(summary.norm, options_.train.clip_norm);
}

engine::UpdateOptions TorchTrainer::update_options(double clip_factor) const {
  const double lr = learning_rate(options_.train, step_ + 1);
  engine::UpdateOptions options;
  options.gradient_scale = 1.0 / options_.train.accumulation * clip_factor;
  for (const ParameterGroup& group : groups_) {
    options.groups.push_back({.lr = lr * group.lr_factor, .weight_decay = group.weight_decay});
  }
  return options;
}

Status TorchTrainer::update(const engine::GradientSummary& summary) {
  SI_RETURN_IF_ERROR(
      updater_->start_update(update_options(clip_factor(summary)), weights_type_, weights_sink()));
  trained_->updated();
  if (stream_->streams()) stream_->start(pass_->order());
  const bool last = step_ + 1 == options_.train.steps;
  return overlap_ == Overlap::kNone || last ? trained_->wait_all() : Status();
}

// The batch is passed over for good: the next step sees other data.
Result<StepReport> TorchTrainer::skip(StepReport report, const std::string& parameter) {
  SI_RETURN_IF_ERROR(updater_->abort());
  if (overlap_ == Overlap::kEarly) {  // has written new weights
    SI_RETURN_IF_ERROR(trained_->load());
  }
  return pass_over(std::move(report), fmt::format("gradient of {} is not finite", parameter),
                   "Lower train.lr, lengthen train.warmup_steps, or set train.clip_norm");
}

Result<StepReport> TorchTrainer::pass_over(StepReport report, std::string why, const char* advice) {
  report.skipped = std::move(why);
  folder_.append_log(report.to_json());
  if (++skips_in_a_row_ <= options_.train.skips_max) return report;
  return Status(
      ErrorCode::kFailedPrecondition,
      fmt::format("step {}: {}, {} times in a row", report.step, report.skipped, skips_in_a_row_),
      advice);
}

Result<Batch> TorchTrainer::read_batch(const Windows& from,
                                       std::span<const uint64_t> windows) const {
  const size_t rows = windows.size();
  const size_t length = options_.data.sequence;
  const auto shape = {static_cast<int64_t>(rows), static_cast<int64_t>(length)};
  const Tensor tokens_BT = torch::empty(shape, torch::kInt64);
  const Tensor targets_BT = torch::empty(shape, torch::kInt64);
  const std::span<int64_t> targets(targets_BT.data_ptr<int64_t>(), rows * length);
  Batch batch;
  SI_RETURN_IF_ERROR(from.read(windows, source_.architecture.vocabulary,
                               {tokens_BT.data_ptr<int64_t>(), rows * length}, targets,
                               batch.document_ends));
  batch.targets = targets.size() - static_cast<uint64_t>(std::ranges::count(targets, kNoTarget));
  batch.tokens_BT = tokens_BT.to(accelerator_);
  batch.targets_BT = targets_BT.to(accelerator_);
  return batch;
}

Result<std::vector<Batch>> TorchTrainer::next_batches(const std::stop_token& stop,
                                                      uint64_t& targets) {
  const uint64_t rows = options_.train.micro_batch;
  const uint64_t first = position_.windows + mine_.begin * rows;
  position_.windows += options_.train.accumulation * rows;
  std::vector<Batch> batches(mine_.size());
  std::vector<uint64_t> windows(rows);
  for (size_t i = 0; i < batches.size(); ++i) {
    for (uint64_t row = 0; row < rows; ++row) {
      windows[row] =
          window_at(options_.data.seed, corpus_.training().count(), first + i * rows + row);
    }
    SI_ASSIGN_OR_RETURN(batches[i], read_batch(corpus_.training(), windows));
    targets += batches[i].targets;
  }
  if (ranks_.alone()) return batches;
  const std::array<uint64_t, 2> mine{targets, stop.stop_requested() ? 1u : 0u};
  SI_ASSIGN_OR_RETURN(const std::vector<uint64_t> all, ranks_.all<uint64_t>(mine));
  targets = 0;
  bool stops = false;
  for (size_t rank = 0; rank < ranks_.world(); ++rank) {
    targets += all[2 * rank];
    stops = stops || all[2 * rank + 1] != 0;
  }
  if (stops) return Status(ErrorCode::kCancelled, "stopped before the step began");
  return batches;
}

Result<std::optional<engine::CheckpointSummary>> TorchTrainer::checkpoint(
    const engine::StateProgress& progress) {
  engine::CheckpointOptions options;
  options.folder = options_.checkpoint.folder;
  options.keep = options_.checkpoint.keep;
  options.progress = progress;
  return keep_copy(std::move(options));
}

Result<std::optional<engine::CheckpointSummary>> TorchTrainer::keep_copy(
    engine::CheckpointOptions options) {
  using Made = std::optional<engine::CheckpointSummary>;
  return together("checkpoint", [&]() -> Result<Made> {
    SI_RETURN_IF_ERROR(trained_->wait_all());
    SI_RETURN_IF_ERROR(updater_->flush());
    const uint64_t begin_ns = base::now_ns();
    options.ring = ring_;
    Result<engine::CheckpointSummary> made = engine::write_checkpoint(*updater_, options);
    const ErrorCode code = made.status().code();
    if (code == ErrorCode::kCancelled || code == ErrorCode::kCorrupt) {
      return std::move(made).status();
    }
    if (!made.ok()) {
      base::log(base::LogLevel::kWarning,
                fmt::format("step {}: no checkpoint: {}", step(), made.status().to_string()));
      return Made();
    }
    folder_.append_log(nlohmann::ordered_json{
        {"step", made->step},
        {"checkpoint", made->path},
        {"state_bytes", made->state_bytes},
        {"cloned", made->cloned},
        {"seconds", base::seconds_since(begin_ns)},
        {"removed",
         made->removed}}.dump());
    return Made(std::move(*made));
  });
}

Result<engine::UpdaterTraffic> TorchTrainer::finish() {
  return together("end of the run", [&]() -> Result<engine::UpdaterTraffic> {
    SI_RETURN_IF_ERROR(trained_->wait_all());
    SI_RETURN_IF_ERROR(updater_->wait_commit());
    const engine::UpdaterTraffic rest = updater_->traffic().since(traffic_);
    SI_RETURN_IF_ERROR(updater_->flush());
    return rest;
  });
}

void TorchTrainer::report_traffic(StepReport& report) {
  const engine::UpdaterTraffic now = updater_->traffic();
  report.traffic = now.since(traffic_);
  traffic_ = now;
  if (const engine::Compression* compression = updater_->compression()) {
    const compress::CompressionSummary summary = compression->summary();
    report.compressed_bytes = summary.bytes;
    report.density = summary.density;
    report.residual_norm = summary.residual_norm;
  }
}

// From the next step on.
void TorchTrainer::choose_offload(StepReport& report) {
  const SpooledBuffers* saved = pass_->saved();
  if (saved == nullptr) return;
  report.offloaded = pass_->offloaded();
  const double waited_s = saved->waited_s() - std::exchange(spool_waited_s_, saved->waited_s());
  if (!offload_choice_ || offload_choice_->decided()) return;
  report.offload_decision =
      offload_choice_->stepped({.seconds = report.seconds,
                                .forward_s = report.forward_s,
                                .waited_s = waited_s,
                                .read_bytes = report.traffic.store.up_total(),
                                .written_bytes = report.traffic.store.down_total()});
  pass_->offload(offload_choice_->offloaded());
}

std::vector<std::string> TorchTrainer::describe() const {
  const model::Architecture& model = source_.architecture;
  std::vector<std::string> lines;
  const auto millions = [](uint64_t count) {
    return fmt::format("{:.{}f}", static_cast<double>(count) * 1e-6, count < 10'000'000 ? 2 : 1);
  };
  const uint64_t all = model::make_units(model).back().end();
  const std::string parameters =
      targets_.empty() ? millions(all)
                       : fmt::format("{} of {}", millions(space_.count()), millions(all));
  lines.push_back(fmt::format(
      "model: {}, {} million parameters, {} layer{} of width {}, {} head{} ({} of keys and "
      "values), {} on {}",
      base::enum_name(model.family), parameters, model.layers, model.layers == 1 ? "" : "s",
      model.width, model.heads, model.heads == 1 ? "" : "s", model.kv_heads,
      base::enum_name(weights_type_), accelerator_.str()));
  if (!source_.remark.empty()) lines.push_back("model: " + source_.remark);
  for (const std::string& note : source_.notes) lines.push_back("model: " + note);
  if (accelerator_.is_cpu() && weights_type_ == base::DataType::kBf16 && !has_fast_bf16()) {
    lines.emplace_back(
        "precision: bf16, for which this processor has no instructions; f32 is faster here "
        "(smartinf doctor measures both)");
  }
  lines.push_back("data: " + corpus_.describe());
  if (options_.train.epochs > 0) {
    lines.push_back(fmt::format("length: {} epochs of {} sequences, {} steps",
                                options_.train.epochs, corpus_.training().count(),
                                options_.train.steps));
  }
  if (options_.train.warmup_steps > options_.train.steps) {
    lines.push_back(fmt::format(
        "lr: the warm-up has {} steps and the run {}, so lr comes to {:.2e} and not to {:.2e}",
        options_.train.warmup_steps, options_.train.steps,
        learning_rate(options_.train, options_.train.steps), options_.train.lr));
  }
  for (std::string& line : updater_->describe_devices()) lines.push_back("state: " + line);
  if (!compression_.empty()) lines.push_back("gradients: " + compression_);
  for (std::string& line : describe_plan(plan_, source_.architecture)) {
    lines.push_back(std::move(line));
  }
  lines.insert(lines.end(), remarks_.begin(), remarks_.end());
  return lines;
}

}  // namespace smartinf::train
