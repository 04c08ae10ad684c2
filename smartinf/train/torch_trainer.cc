#include "smartinf/train/torch_trainer.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/train/lr_schedule.h"
#include "smartinf/train/product_rate.h"
#include "smartinf/train/read_batch.h"
#include "smartinf/train/window_order.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

Result<StepReport> TorchTrainer::train_step(std::stop_token stop) {
  return together("training step", [&]() -> Result<StepReport> {
    StepReport report = begin_report();
    SI_RETURN_IF_ERROR(begin_layer_stats());
    clock_.begin(pass_->waited_s());
    const uint64_t first_window = run_.position.windows;
    const auto batches = next_batches(stop, report.targets);
    Status computed = batches.status();
    if (computed.ok()) {
      if (report.targets == 0) {
        return run_.pass_over(std::move(report), "no token of its batches counts as a target",
                              "Make train.micro_batch or train.accumulation larger, or leave out "
                              "data that no loss_mask counts",
                              options_.train.skips_max);
      }
      computed = compute_gradients(*batches, stop, report);
    }
    if (computed.code() == ErrorCode::kCancelled) run_.position.windows = first_window;
    SI_RETURN_IF_ERROR(computed);

    clock_.update_begins();
    SI_RETURN_IF_ERROR(gradients_->finish());
    if (EmbeddingTable* table = weights_.model().table()) {
      SI_RETURN_IF_ERROR(table->put_gradients());
    }
    SI_ASSIGN_OR_RETURN(const engine::GradientSummary summary,
                        updater_->finish_gradients(1.0 / options_.train.accumulation));
    report.gradient_norm = summary.norm;
    if (!summary.finite) return skip(std::move(report), summary.first_bad);
    SI_RETURN_IF_ERROR(start_update(summary));
    run_.advance();
    complete_report(report, summary);
    // Before the commit: a line too many is cut when the run goes on, one that a crash kept from
    // being written would stay missing.
    run_.folder.append_log(report.to_json());
    SI_RETURN_IF_ERROR(start_commit(stop));
    SI_RETURN_IF_ERROR(end_layer_stats());
    return report;
  });
}

StepReport TorchTrainer::begin_report() const {
  StepReport report;
  report.step = run_.step + 1;
  report.lr = learning_rate(options_.train, report.step);
  report.began_s = base::seconds_since_1970();
  return report;
}

void TorchTrainer::complete_report(StepReport& report, const engine::GradientSummary& summary) {
  clock_.updated();
  clock_.report(report, pass_->waited_s());
  report.overlap = base::enum_name(overlap_.now());
  report.wrong_guess = overlap_.now() == Overlap::kEarly && clip_factor(summary) != 1;
  overlap_.stepped(report);
  report_traffic(report);
  choose_offload(report);
}

Status TorchTrainer::start_commit(const std::stop_token& stop) {
  if (residual_.must_write(run_.step, options_, stop.stop_requested())) {
    updater_->compression()->write_residual();
    residual_.wrote(run_.step);
  }
  SI_RETURN_IF_ERROR(updater_->start_commit(run_.position.to_json()));
  // An update waits for the forward that asks for its weights.
  const bool follow = weights_.updates_follow_forward() || pipeline_.stages.chunks > 1;
  if (follow && overlap_.now() == Overlap::kNone) {  // alike on all ranks
    const uint64_t commit_ns = base::now_ns();
    SI_RETURN_IF_ERROR(updater_->wait_commit());
    clock_.waited_after_step(base::seconds_since(commit_ns));
  }
  const bool saves = in_memory_ && run_.step % options_.train.save_every == 0;
  return saves ? updater_->flush() : Status();
}

// Weights are read from where the state is, which has all of them in f32: in memory some may be
// missing, and bf16 hides small updates. This waits for commits, and changes nothing else.
Status TorchTrainer::begin_layer_stats() {
  const uint64_t every = options_.train.layer_stats_every;
  layer_stats_.reset();
  if (every == 0 || (run_.step + 1) % every != 0) return Status();
  layer_stats_ = std::make_unique<LayerStats>(space_);
  layer_stats_->begin();
  SI_RETURN_IF_ERROR(weights_.trained().wait_all());
  return updater_->read_weights([this](uint64_t first, std::span<const float> weights) {
    layer_stats_->add_weights(first, weights);
    return Status();
  });
}

Status TorchTrainer::end_layer_stats() {
  if (layer_stats_ == nullptr) return Status();
  SI_RETURN_IF_ERROR(weights_.trained().wait_all());
  SI_RETURN_IF_ERROR(updater_->read_weights([this](uint64_t first, std::span<const float> weights) {
    layer_stats_->add_updated_weights(first, weights);
    return Status();
  }));
  run_.folder.append_log(layer_stats_->to_json(run_.step, 1.0 / options_.train.accumulation));
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
    if (!stop.stop_requested() || residual_.lags(run_.step) || !ranks_.alone()) return;
    throw StatusError(Status(ErrorCode::kCancelled, "stopped before the step was complete"));
  };
  pass.micro_batches = train.accumulation;
  pass.mine = mine_;
  pass.by_tree = replicas() > 1 || options_.ranks.order == SumOrder::kFixed;
  pass.take_gradient = [this](UnitPass::Gradient gradient) {
    if (layer_stats_ != nullptr) {
      layer_stats_->add_gradient(gradient.first, gradient.sums.front());
    }
    gradients_->take(std::move(gradient));
  };
  // Where units do not stay, each of them does all micro batches before the next one comes.
  const size_t at_once = plan_.streams || pipeline_.on() ? batches.size() : 1;
  const StageLink* link = pass_->link();
  const double link_waited_s = link != nullptr ? link->waited_s() : 0;
  const uint64_t link_sent = link != nullptr ? link->sent_bytes() : 0;
  std::vector<double> losses;
  for (size_t i = 0; i < batches.size(); i += at_once) {
    const std::span<const Batch> together = batches.subspan(i, at_once);
    const uint64_t forward_ns = base::now_ns();
    const double waited_s = pass_->waited_s();
    pass.first = mine_.begin + i;
    if (weights_.model().table() != nullptr) {
      pass.tokens_behind_BT = i + at_once < batches.size() ? batches[i + at_once].tokens_BT
                                                           : first_tokens_of_next_step();
      const uint64_t most = base::divide_up(uint64_t{train.accumulation}, replicas());
      pass.lookups_behind = i + at_once < batches.size() ? 0 : most - batches.size();
    }
    pass.times_forward = offload_choice_ && !offload_choice_->decided();
    for (const double loss : pass_->train(together, pass)) losses.push_back(loss);
    if (link != nullptr) break;
    const double forward_waited_s = pass_->backward_began_waited_s() - waited_s;
    clock_.passed(report, forward_ns, pass_->backward_began_ns(), forward_waited_s,
                  pass_->waited_s() - waited_s - forward_waited_s);
  }
  if (link != nullptr) {
    for (const Phase& phase : pass_->stage_phases()) {
      const bool forward = phase.name == std::string_view("forward");
      (forward ? report.forward_s : report.backward_s) +=
          static_cast<double>(phase.end_ns - phase.begin_ns) * 1e-9;
      report.phases.push_back(phase);
    }
    report.pipeline = true;
    report.pipeline_wait_s = link->waited_s() - link_waited_s;
    report.pipeline_sent_bytes = link->sent_bytes() - link_sent;
  }
  SI_ASSIGN_OR_RETURN(losses, losses_of_all(losses));
  for (const double loss : losses) report.loss += loss / accumulation;
  return Status();
}

Status TorchTrainer::begin_step() {
  const uint64_t begin_ns = base::now_ns();
  SI_RETURN_IF_ERROR(updater_->begin_step());
  clock_.waited_for_commit(base::seconds_since(begin_ns));
  const TrainOptions& train = options_.train;
  overlap_.choose(/*last=*/run_.step + 1 == train.steps, *updater_);
  if (overlap_.now() != Overlap::kEarly) return Status();
  return updater_->start_early_update(update_options(1), weights_.type(), weights_.sink(),
                                      train.clip_norm * train.accumulation);
}

double TorchTrainer::clip_factor(const engine::GradientSummary& summary) const {
  return engine::clip_factor(summary.norm, options_.train.clip_norm);
}

engine::UpdateOptions TorchTrainer::update_options(double clip_factor) const {
  const double lr = learning_rate(options_.train, run_.step + 1);
  engine::UpdateOptions options;
  options.gradient_scale = 1.0 / options_.train.accumulation * clip_factor;
  for (const ParameterGroup& group : groups_) {
    options.groups.push_back({.lr = lr * group.lr_factor, .weight_decay = group.weight_decay});
  }
  options.table_rates = {lr * table_lr_factor_};
  return options;
}

Status TorchTrainer::start_update(const engine::GradientSummary& summary) {
  SI_RETURN_IF_ERROR(updater_->start_update(update_options(clip_factor(summary)), weights_.type(),
                                            weights_.sink()));
  weights_.trained().updated();
  if (weights_.stream().streams()) weights_.stream().start(pass_->order());
  const bool last = run_.step + 1 == options_.train.steps;
  return overlap_.now() == Overlap::kNone || last ? weights_.trained().wait_all() : Status();
}

// The batch is passed over for good: the next step sees other data.
Result<StepReport> TorchTrainer::skip(StepReport report, const std::string& parameter) {
  SI_RETURN_IF_ERROR(updater_->abort());
  if (overlap_.now() == Overlap::kEarly) {  // has written new weights
    SI_RETURN_IF_ERROR(weights_.trained().load());
  }
  return run_.pass_over(std::move(report), fmt::format("gradient of {} is not finite", parameter),
                        "Lower train.lr, lengthen train.warmup_steps, or set train.clip_norm",
                        options_.train.skips_max);
}

Result<Batch> TorchTrainer::read_batch(const Windows& from,
                                       std::span<const uint64_t> windows) const {
  return train::read_batch(from, windows, source_.architecture.vocabulary, options_.data.sequence,
                           weights_.accelerator());
}

Result<std::vector<Batch>> TorchTrainer::next_batches(const std::stop_token& stop,
                                                      uint64_t& targets) {
  const uint64_t rows = options_.train.micro_batch;
  const uint64_t first = run_.position.windows + mine_.begin * rows;
  run_.position.windows += options_.train.accumulation * rows;
  std::vector<Batch> batches(mine_.size());
  std::vector<uint64_t> windows(rows);
  for (size_t i = 0; i < batches.size(); ++i) {
    for (uint64_t row = 0; row < rows; ++row) {
      windows[row] =
          window_at(options_.data.seed, corpus_.training().count(), first + i * rows + row);
    }
    SI_ASSIGN_OR_RETURN(batches[i], read_batch(corpus_.training(), windows));
    if (teacher_logits_) {
      batches[i].teacher = teacher_logits_->at(first / rows + i, weights_.accelerator());
    }
    targets += batches[i].targets;
  }
  if (ranks_.alone()) return batches;
  const std::array<uint64_t, 2> mine{targets, stop.stop_requested() ? 1u : 0u};
  SI_ASSIGN_OR_RETURN(const std::vector<uint64_t> all, ranks_.all<uint64_t>(mine));
  targets = 0;
  bool stops = false;
  for (size_t rank = 0; rank < ranks_.world(); ++rank) {
    if (rank < replicas()) targets += all[2 * rank];  // the other stages have the same
    stops = stops || all[2 * rank + 1] != 0;
  }
  if (stops) return Status(ErrorCode::kCancelled, "stopped before the step began");
  return batches;
}

/// Undefined where there is no next step; what is wrong with its data it will say itself.
Tensor TorchTrainer::first_tokens_of_next_step() const {
  if (run_.step + 1 >= options_.train.steps) return {};
  const uint64_t rows = options_.train.micro_batch;
  std::vector<uint64_t> windows(rows);
  for (uint64_t row = 0; row < rows; ++row) {
    windows[row] = window_at(options_.data.seed, corpus_.training().count(),
                             run_.position.windows + mine_.begin * rows + row);
  }
  const Result<Batch> batch = read_batch(corpus_.training(), windows);
  return batch.ok() ? batch->tokens_BT : Tensor();
}

Result<std::vector<double>> TorchTrainer::losses_of_all(std::span<const double> mine) const {
  if (ranks_.alone()) return std::vector<double>(mine.begin(), mine.end());
  const uint64_t count = options_.train.accumulation;
  const auto most = static_cast<size_t>(base::divide_up(count, replicas()));
  std::vector<double> padded(mine.begin(), mine.end());
  padded.resize(most);
  SI_ASSIGN_OR_RETURN(const std::vector<double> all, ranks_.all<double>(padded));
  std::vector<double> losses;
  for (uint32_t replica = 0; replica < replicas(); ++replica) {
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(rank_of_head(replica) * most);
    const auto of_rank = plan::micro_batches_of(count, replica, replicas()).size();
    losses.insert(losses.end(), from, from + static_cast<std::ptrdiff_t>(of_rank));
  }
  return losses;
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
    SI_RETURN_IF_ERROR(weights_.trained().wait_all());
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
    run_.folder.append_log(nlohmann::ordered_json{
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
    SI_RETURN_IF_ERROR(weights_.trained().wait_all());
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
  const uint64_t all = model::make_units(model.whole()).back().end();
  const std::string parameters =
      targets_.empty() ? millions(all)
                       : fmt::format("{} of {}", millions(space_.count()), millions(all));
  lines.push_back(fmt::format(
      "model: {}, {} million parameters, {} layer{} of width {}, {} head{} ({} of keys and "
      "values), {} on {}",
      base::enum_name(model.family), parameters, model.layers, model.layers == 1 ? "" : "s",
      model.width, model.heads, model.heads == 1 ? "" : "s", model.kv_heads,
      base::enum_name(weights_.type()), weights_.accelerator().str()));
  if (!source_.notice.empty()) lines.push_back("model: " + source_.notice);
  for (const std::string& note : source_.notes) lines.push_back("model: " + note);
  if (weights_.accelerator().is_cpu() && weights_.type() == base::DataType::kBf16 &&
      !has_fast_bf16()) {
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
  if (const engine::RowTables* tables = updater_->tables()) {
    const engine::TableOptions& table = tables->table(0);
    lines.push_back(
        fmt::format("table: {}, {} rows of {} by {}, which have no weight decay, on the devices",
                    table.name, table.rows, table.dim, kernels::row_rule_name(table.rule.rule)));
  }
  if (!compression_.empty()) lines.push_back("gradients: " + compression_);
  lines.insert(lines.end(), stage_lines_.begin(), stage_lines_.end());
  for (std::string& line : describe_plan(plan_)) {
    if (stage_lines_.empty()) lines.push_back(std::move(line));
  }
  lines.insert(lines.end(), run_.notices.begin(), run_.notices.end());
  return lines;
}

}  // namespace smartinf::train
