#include "smartinf/train/torch_trainer.h"

#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/early_update_pays.h"
#include "smartinf/train/lr_schedule.h"
#include "smartinf/train/window_order.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

torch::ScalarType scalar_type(base::DataType type) {
  switch (type) {
    case base::DataType::kF32:
      return torch::kFloat32;
    case base::DataType::kBf16:
      return torch::kBFloat16;
    case base::DataType::kF16:
      return torch::kFloat16;
  }
  return torch::kFloat32;
}

Result<StepReport> TorchTrainer::train_step(std::stop_token stop) {
  return guarded("training step", [&]() -> Result<StepReport> {
    StepReport report;
    report.step = step_ + 1;
    report.lr = learning_rate(options_.train, report.step);
    const uint64_t begin_ns = base::now_ns();
    const uint64_t first_window = position_.windows;

    for (uint32_t i = 0; i < options_.train.accumulation; ++i) {
      if (stop.stop_requested() && !residual_lags()) {
        position_.windows = first_window;
        for (Parameter& parameter : model_->parameters()) parameter.weight.mutable_grad().reset();
        return Status(ErrorCode::kCancelled, "stopped before the step was complete");
      }
      SI_ASSIGN_OR_RETURN(const Batch batch, next_batch());
      const uint64_t forward_ns = base::now_ns();
      const double waited_s = waited_s_;
      const Tensor loss = model_->loss(batch.tokens_BT, batch.targets_BT);
      report.loss += loss.item<double>() / options_.train.accumulation;
      const uint64_t backward_ns = base::now_ns();
      last_micro_batch_ = i + 1 == options_.train.accumulation;
      loss.backward();
      if (!last_micro_batch_) SI_RETURN_IF_ERROR(accumulate_gradients(i));
      const uint64_t end_ns = base::now_ns();

      report.tokens += static_cast<uint64_t>(batch.tokens_BT.numel());
      report.forward_s +=
          static_cast<double>(backward_ns - forward_ns) * 1e-9 - (waited_s_ - waited_s);
      report.backward_s += static_cast<double>(end_ns - backward_ns) * 1e-9;
      report.phases.push_back({"forward", forward_ns, backward_ns});
      report.phases.push_back({"backward", backward_ns, end_ns});
    }

    const uint64_t update_ns = base::now_ns();
    if (!begun_) SI_RETURN_IF_ERROR(begin_step());  // the one before is committed now
    SI_RETURN_IF_ERROR(put_gradients());
    begun_ = last_micro_batch_ = false;
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

    report.seconds = static_cast<double>(end_ns - begin_ns) * 1e-9;
    report.update_s = report.seconds - report.forward_s - report.backward_s;
    report.exposed_s = std::exchange(waited_s_, 0);
    if (overlap_ == Overlap::kLate) late_exposed_ = report.exposed_s / report.seconds;
    report.phases.push_back({"update", update_ns, end_ns});
    report_traffic(report);
    // Before the commit: a line too many is cut when the run goes on, one that a crash kept from
    // being written would stay missing.
    folder_.append_log(report.to_json());
    if (must_write_residual(stop)) {
      updater_->compression()->write_residual();
      residual_written_ = step_;
    }
    SI_RETURN_IF_ERROR(updater_->start_commit(position_.to_json()));
    if (in_memory_ && step_ % options_.train.save_every == 0) {
      SI_RETURN_IF_ERROR(updater_->flush());
    }
    return report;
  });
}

// The residual goes to the devices within a step only: a run that is interrupted between two steps
// that write it makes one more step, so that it resumes with the same bits.
bool TorchTrainer::residual_lags() const {
  if (residual_every_ == 0 || step_ == residual_written_) return false;
  return step_ % residual_every_ != 0;
}

bool TorchTrainer::must_write_residual(const std::stop_token& stop) const {
  const uint64_t every = options_.checkpoint.every;
  const bool checkpoint_comes = every != 0 && step_ % every == 0;
  return residual_every_ != 0 &&
         (step_ == options_.train.steps || checkpoint_comes || stop.stop_requested());
}

// Weights of bf16 have gradients of bf16; their sum over micro batches is kept in f32.
Status TorchTrainer::accumulate_gradients(uint32_t micro_batch) {
  if (options_.train.accumulation == 1) return Status();
  sums_.resize(model_->parameters().size());
  for (size_t i = 0; i < sums_.size(); ++i) {
    Tensor& gradient = model_->parameters()[i].weight.mutable_grad();
    if (micro_batch == 0) {
      sums_[i] = gradient.to(torch::kFloat32, /*non_blocking=*/false, /*copy=*/true);
    } else {
      sums_[i].add_(gradient);
    }
    gradient.reset();
  }
  return Status();
}

// While the commit of the step before goes on they wait here, and autograd does not.
void TorchTrainer::gradient_arrived(size_t parameter) {
  if (!last_micro_batch_) return;
  gradients_ready_.push_back(parameter);
  if (!begun_ && updater_->committing()) return;
  Status status = begun_ ? Status() : begin_step();
  if (status.ok()) status = put_gradients();
  if (!status.ok()) throw StatusError(std::move(status));
}

Status TorchTrainer::begin_step() {
  const uint64_t begin_ns = base::now_ns();
  SI_RETURN_IF_ERROR(updater_->begin_step());
  waited_s_ += base::seconds_since(begin_ns);
  begun_ = true;
  overlap_ = overlap_of_next_step();
  if (overlap_ != Overlap::kEarly) return Status();
  const TrainOptions& train = options_.train;
  return updater_->start_early_update(
      update_options(1), weights_type_, [this](uint64_t first) { return weights_at(first); },
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

// In the order in which backward makes them; each gradient is freed once it is down.
Status TorchTrainer::put_gradients() {
  const torch::ScalarType type = scalar_type(gradient_type_);
  for (const size_t i : std::exchange(gradients_ready_, {})) {
    Parameter& parameter = model_->parameters()[i];
    Tensor gradient = std::exchange(parameter.weight.mutable_grad(), Tensor());
    if (!sums_.empty()) gradient = std::exchange(sums_[i], Tensor()).add_(gradient);
    gradient = gradient.to(type).to(torch::kCPU).contiguous();
    SI_RETURN_IF_ERROR(updater_->put_gradient(parameter.first, gradient.const_data_ptr(),
                                              gradient_type_,
                                              static_cast<uint64_t>(gradient.numel())));
  }
  return Status();
}

double TorchTrainer::clip_factor(const engine::GradientSummary& summary) const {
  const double clip_norm = options_.train.clip_norm;
  return clip_norm > 0 && summary.norm > clip_norm ? clip_norm / summary.norm : 1;
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
  SI_RETURN_IF_ERROR(updater_->start_update(update_options(clip_factor(summary)), weights_type_,
                                            [this](uint64_t first) { return weights_at(first); }));
  weights_used_ = 0;
  const bool last = step_ + 1 == options_.train.steps;
  return overlap_ == Overlap::kNone || last ? use_all_weights() : Status();
}

Status TorchTrainer::use_weights(uint64_t first, uint64_t count) {
  if (first + count <= weights_used_) return Status();
  const uint64_t begin_ns = base::now_ns();
  const uint64_t from = weights_used_;
  const uint64_t some = first + count - from;
  SI_RETURN_IF_ERROR(updater_->wait_weights(from, some));
  if (!accelerator_.is_cpu()) {
    const auto part = [&](const Tensor& weights_N) {
      return weights_N.narrow(0, static_cast<int64_t>(from), static_cast<int64_t>(some));
    };
    part(weights_N_).copy_(part(host_weights_N_), /*non_blocking=*/true);
  }
  weights_used_ = from + some;
  waited_s_ += base::seconds_since(begin_ns);
  return Status();
}

// The batch is passed over for good: the next step sees other data.
Result<StepReport> TorchTrainer::skip(StepReport report, const std::string& parameter) {
  SI_RETURN_IF_ERROR(updater_->abort());
  if (overlap_ == Overlap::kEarly) {  // has written new weights
    SI_RETURN_IF_ERROR(updater_->load_weights(
        weights_type_, [this](uint64_t first) { return weights_at(first); }));
  }
  report.skipped = fmt::format("gradient of {} is not finite", parameter);
  folder_.append_log(report.to_json());
  if (++skips_in_a_row_ > options_.train.skips_max) {
    return Status(
        ErrorCode::kFailedPrecondition,
        fmt::format("step {}: {}, {} times in a row", report.step, report.skipped, skips_in_a_row_),
        "Lower train.lr, lengthen train.warmup_steps, or set train.clip_norm");
  }
  return report;
}

void* TorchTrainer::weights_at(uint64_t element) const {
  return static_cast<std::byte*>(host_weights_N_.data_ptr()) +
         element * base::data_type_bytes(weights_type_);
}

// Window w is the tokens [w T, w T + T] of the stream: T to read, each with the one after it as
// target.
Result<TorchTrainer::Batch> TorchTrainer::read_windows(const TokenStream& stream,
                                                       std::span<const uint64_t> windows) const {
  const auto rows = static_cast<int64_t>(windows.size());
  const auto length = static_cast<int64_t>(options_.data.sequence);
  const Tensor window_BT = torch::empty({rows, length + 1}, torch::kInt64);
  for (size_t row = 0; row < windows.size(); ++row) {
    const auto window = static_cast<size_t>(length + 1);
    SI_RETURN_IF_ERROR(stream.read(windows[row] * options_.data.sequence, options_.model.vocabulary,
                                   {window_BT.data_ptr<int64_t>() + row * window, window}));
  }
  return Batch{window_BT.narrow(1, 0, length).to(accelerator_),
               window_BT.narrow(1, 1, length).to(accelerator_)};
}

Result<TorchTrainer::Batch> TorchTrainer::next_batch() {
  const uint64_t count = (corpus_.training().count() - 1) / options_.data.sequence;
  std::vector<uint64_t> windows(options_.train.micro_batch);
  for (uint64_t& window : windows) {
    window = window_at(options_.data.seed, count, position_.windows++);
  }
  return read_windows(corpus_.training(), windows);
}

Result<std::optional<engine::CheckpointSummary>> TorchTrainer::checkpoint(
    const engine::StateProgress& progress) {
  using Made = std::optional<engine::CheckpointSummary>;
  return guarded("checkpoint", [&]() -> Result<Made> {
    SI_RETURN_IF_ERROR(use_all_weights());
    SI_RETURN_IF_ERROR(updater_->flush());
    const uint64_t begin_ns = base::now_ns();
    engine::CheckpointOptions options;
    options.folder = options_.checkpoint.folder;
    options.keep = options_.checkpoint.keep;
    options.ring = ring_;
    options.progress = progress;
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

Status TorchTrainer::finish() {
  return guarded("end of the run", [&]() -> Status {
    SI_RETURN_IF_ERROR(use_all_weights());
    return updater_->flush();
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

std::vector<std::string> TorchTrainer::describe() const {
  const ModelOptions& model = options_.model;
  std::vector<std::string> lines;
  lines.push_back(fmt::format(
      "model: {:.2f} million parameters, {} layer{} of width {}, {} head{} ({} of keys and "
      "values), "
      "{} on {}",
      static_cast<double>(space_.count()) * 1e-6, model.layers, model.layers == 1 ? "" : "s",
      model.width, model.heads, model.heads == 1 ? "" : "s", model.kv_heads,
      base::enum_name(options_.train.precision), accelerator_.str()));
  lines.push_back("data: " + corpus_.describe());
  for (std::string& line : updater_->describe_devices()) lines.push_back("state: " + line);
  if (!compression_.empty()) lines.push_back("gradients: " + compression_);
  lines.push_back(fmt::format(
      "memory: {} weights in the host's memory{}, {} gradients{}, {} "
      "buffers{}; activations and torch come on top",
      base::format_bytes(host_weights_N_.nbytes()),
      accelerator_.is_cpu() ? "" : " and once more on the GPU",
      base::format_bytes(updater_->gradient_memory_bytes()),
      compression_.empty() ? "" : " and compression", base::format_bytes(updater_->memory_bytes()),
      updater_->state_cache_bytes() == 0
          ? ""
          : fmt::format(", {} of state", base::format_bytes(updater_->state_cache_bytes()))));
  if (!remark_.empty()) lines.push_back(remark_);
  return lines;
}

}  // namespace smartinf::train
