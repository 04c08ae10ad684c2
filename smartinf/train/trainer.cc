#include "smartinf/train/trainer.h"

#include <cmath>
#include <filesystem>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/cuda.h>
#include <torch/types.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/density.h"
#include "smartinf/engine/found_run.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/updater.h"
#include "smartinf/train/corpus.h"
#include "smartinf/train/lr_schedule.h"
#include "smartinf/train/memory_updater.h"
#include "smartinf/train/model.h"
#include "smartinf/train/parameter_groups.h"
#include "smartinf/train/parameters.h"
#include "smartinf/train/position.h"
#include "smartinf/train/random.h"
#include "smartinf/train/run_choice.h"
#include "smartinf/train/run_folder.h"
#include "smartinf/train/tensor_memory.h"
#include "smartinf/train/window_order.h"

namespace smartinf::train {
namespace {

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

// Runs `body`, which returns a Status or Result, and makes a Status of what torch throws.
template <typename Body>
auto guarded(const char* doing, Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::kOutOfMemory, fmt::format("{}: out of memory", doing),
                  "Make train.micro_batch or data.sequence smaller, or set "
                  "train.checkpoint_activations = true");
  } catch (const c10::OutOfMemoryError& error) {
    return Status(ErrorCode::kOutOfMemory,
                  fmt::format("{}: {}", doing, error.what_without_backtrace()),
                  "Make train.micro_batch or data.sequence smaller, or set "
                  "train.checkpoint_activations = true");
  } catch (const c10::Error& error) {
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("{}: {}", doing, error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return Status(ErrorCode::kFailedPrecondition, fmt::format("{}: {}", doing, error.what()));
  }
}

Status different(const char* key, const std::string& here, const std::string& there) {
  return Status(ErrorCode::kMismatch,
                fmt::format("{} is {} here and {} in the run", key, here, there),
                "Go on with the value the run was started with, or choose another train.run");
}

// A run's log has steps, and its devices have no state.
Status without_state(const RunFolder& folder, base::StepNumber trained, const std::string& where) {
  return Status(
      ErrorCode::kNotFound,
      fmt::format("train.run: {} has trained {} step{}, but {}", folder.path(), trained,
                  trained == 1 ? "" : "s", where),
      fmt::format("Name the devices it was trained on (they stand in {}), or choose another "
                  "train.run. To start over, remove the folder",
                  folder.file(kRecipeFile)));
}

Result<torch::Device> choose_accelerator(const std::string& name) {
  const bool cuda = torch::cuda::is_available();
  if (name == "cuda" && !cuda) {
    return Status(ErrorCode::kUnsupported, "train.accelerator is \"cuda\", but torch sees no GPU",
                  "Choose \"auto\" or \"cpu\", or look at what smartinf doctor says");
  }
  return torch::Device(name == "cpu" || !cuda ? torch::kCPU : torch::kCUDA);
}

class TorchTrainer final : public Trainer {
 public:
  TorchTrainer(Options options, Corpus corpus, RunFolder folder, GroupedParameters parameters,
               torch::Device accelerator)
      : options_(std::move(options)),
        corpus_(std::move(corpus)),
        folder_(std::move(folder)),
        space_(std::move(parameters.space)),
        groups_(std::move(parameters.groups)),
        accelerator_(accelerator),
        weights_type_(precision_data_type(options_.train.precision)) {}

  ~TorchTrainer() override {
    // A commit in flight writes from memory that this object owns.
    if (updater_ != nullptr) static_cast<void>(updater_->wait_commit());
  }

  /// Errors also: of a state that came to the devices since `run_start` was made.
  Status start(const Job& job, const RunStart& run_start);

  const Options& options() const override { return options_; }
  base::StepNumber step() const override { return step_; }
  Result<StepReport> train_step(std::stop_token stop) override;
  Result<std::optional<engine::CheckpointSummary>> checkpoint(
      const engine::StateProgress& progress) override;
  Result<double> validation_loss() override;
  Result<std::string> sample() override;
  Status finish() override;
  std::vector<std::string> describe() const override;

 private:
  struct Batch {
    Tensor tokens_BT;
    Tensor targets_BT;
  };
  Result<Batch> read_windows(const TokenStream& stream, std::span<const uint64_t> windows) const;
  Result<Batch> next_batch();

  Status accumulate_gradients(uint32_t micro_batch);
  Status put_gradients();
  bool residual_lags() const;
  bool must_write_residual(const std::stop_token& stop) const;
  Result<StepReport> skip(StepReport report, const std::string& parameter);
  Status update(const engine::GradientSummary& summary, double lr);
  Status open_devices(const Job& job, const RunStart& run_start);
  Status keep_history(const Job& job, const RunStart& run_start, base::StepNumber logged);
  void report_traffic(StepReport& report);
  void* weights_at(uint64_t element) const;

  // Destroyed last, when all tensors are gone: their pages go back before the process ends, because
  // torch's own end touches much of its library for the first time and needs room for that.
  struct TensorMemory {
    ~TensorMemory() { unmap_waiting_pages(); }
  } tensor_memory_;
  Options options_;
  Corpus corpus_;
  RunFolder folder_;
  plan::ParameterSpace space_;
  std::vector<ParameterGroup> groups_;
  torch::Device accelerator_;
  base::DataType weights_type_;

  Tensor host_weights_N_;  // where updates arrive; pinned beside a GPU
  Tensor weights_N_;       // what the model uses; the same tensor without a GPU
  std::unique_ptr<Model> model_;
  std::vector<Tensor> sums_;  // f32, per parameter, over micro batches; empty without accumulation

  std::vector<std::string> device_paths_;
  std::string compression_;                // what is sent; empty where gradients are dense
  uint64_t residual_every_ = 0;            // 0: no residual is written
  base::StepNumber residual_written_ = 0;  // the last step of ours that was made to write it
  storage::RingKind ring_ = storage::RingKind::kAuto;
  std::unique_ptr<engine::Updater> updater_;  // after the weights: it writes into them
  MemoryUpdater* memory_ = nullptr;           // the same, with optimizer.where = "memory"
  base::DataType gradient_type_ = base::DataType::kBf16;
  engine::UpdaterTraffic traffic_;

  base::StepNumber first_ = 0;  // what training began from
  base::StepNumber step_ = 0;
  Position position_;
  RunRecord record_;    // of the state on devices
  std::string remark_;  // on the log
  uint32_t skips_in_a_row_ = 0;
};

// ------------------------------------------------------------------------------------ the loop

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
      const Tensor loss = model_->loss(batch.tokens_BT, batch.targets_BT);
      report.loss += loss.item<double>() / options_.train.accumulation;
      const uint64_t backward_ns = base::now_ns();
      loss.backward();
      SI_RETURN_IF_ERROR(accumulate_gradients(i));
      const uint64_t end_ns = base::now_ns();

      report.tokens += static_cast<uint64_t>(batch.tokens_BT.numel());
      report.forward_s += static_cast<double>(backward_ns - forward_ns) * 1e-9;
      report.backward_s += static_cast<double>(end_ns - backward_ns) * 1e-9;
      report.phases.push_back({"forward", forward_ns, backward_ns});
      report.phases.push_back({"backward", backward_ns, end_ns});
    }

    const uint64_t update_ns = base::now_ns();
    SI_RETURN_IF_ERROR(updater_->begin_step());  // the step before this one is committed now
    SI_RETURN_IF_ERROR(put_gradients());
    SI_ASSIGN_OR_RETURN(const engine::GradientSummary summary,
                        updater_->finish_gradients(1.0 / options_.train.accumulation));
    report.gradient_norm = summary.norm;
    if (!summary.finite) return skip(std::move(report), summary.first_bad);
    SI_RETURN_IF_ERROR(update(summary, report.lr));
    ++step_;
    skips_in_a_row_ = 0;
    const uint64_t end_ns = base::now_ns();

    report.update_s = static_cast<double>(end_ns - update_ns) * 1e-9;
    report.seconds = static_cast<double>(end_ns - begin_ns) * 1e-9;
    report.phases.push_back({"update", update_ns, end_ns});
    report_traffic(report);
    // Before the commit: a line too many is cut when the run goes on, one that a crash kept from
    // being written would stay missing.
    folder_.append_log(report.to_json());
    if (must_write_residual(stop)) {
      updater_->keep_residual();
      residual_written_ = step_;
    }
    SI_RETURN_IF_ERROR(updater_->start_commit(position_.to_json()));
    if (memory_ != nullptr && step_ % options_.train.save_every == 0) {
      SI_RETURN_IF_ERROR(memory_->save());
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

// Last parameter first, as backward makes them; each gradient is freed once it is down.
Status TorchTrainer::put_gradients() {
  const torch::ScalarType type = scalar_type(gradient_type_);
  for (size_t i = model_->parameters().size(); i-- > 0;) {
    Parameter& parameter = model_->parameters()[i];
    Tensor gradient = sums_.empty() ? std::exchange(parameter.weight.mutable_grad(), Tensor())
                                    : std::exchange(sums_[i], Tensor());
    gradient = gradient.to(type).to(torch::kCPU).contiguous();
    SI_RETURN_IF_ERROR(updater_->put_gradient(parameter.first, gradient.const_data_ptr(),
                                              gradient_type_,
                                              static_cast<uint64_t>(gradient.numel())));
  }
  return Status();
}

Status TorchTrainer::update(const engine::GradientSummary& summary, double lr) {
  const TrainOptions& train = options_.train;
  engine::UpdateOptions options;
  options.gradient_scale = 1.0 / train.accumulation;
  if (train.clip_norm > 0 && summary.norm > train.clip_norm) {
    options.gradient_scale *= train.clip_norm / summary.norm;
  }
  for (const ParameterGroup& group : groups_) {
    options.groups.push_back({.lr = lr * group.lr_factor, .weight_decay = group.weight_decay});
  }
  SI_RETURN_IF_ERROR(updater_->start_update(options, weights_type_,
                                            [this](uint64_t first) { return weights_at(first); }));
  SI_RETURN_IF_ERROR(updater_->wait_weights(0, space_.count()));
  if (!accelerator_.is_cpu()) weights_N_.copy_(host_weights_N_);
  return Status();
}

// The batch is passed over for good: the next step sees other data.
Result<StepReport> TorchTrainer::skip(StepReport report, const std::string& parameter) {
  SI_RETURN_IF_ERROR(updater_->abort());
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

// ------------------------------------------------------------------------------------ around it

/// Deletes the state of one run, and nothing that is of another.
Status discard_run(const engine::UpdaterOptions& options, const storage::RunId& run) {
  for (const auto& source : engine::local_sources(options)) {
    SI_ASSIGN_OR_RETURN(const auto state, source->peek());
    if (state && state->run == run) SI_RETURN_IF_ERROR(source->erase());
  }
  return Status();
}

Status TorchTrainer::open_devices(const Job& job, const RunStart& run_start) {
  const base::StepNumber trained = run_start.discard ? 0 : logged_step(folder_.path());
  engine::UpdaterOptions options = job.updater;
  options.where = options_.train.where == OptimizerWhere::kHost ? engine::UpdateWhere::kHost
                                                                : engine::UpdateWhere::kDevice;
  if (run_start.discard) {
    SI_RETURN_IF_ERROR(discard_run(options, run_start.found->run));
    SI_ASSIGN_OR_RETURN(const std::string aside, folder_.set_log_aside());
    if (!aside.empty()) remark_ = "log: that of the run before is in " + aside;
  }
  // A run that has trained has its state somewhere: it is not begun anew on empty devices.
  options.create = trained == 0;
  base::Result<std::unique_ptr<engine::Updater>> opened = engine::Updater::open(options, space_);
  if (opened.status().code() == ErrorCode::kNotFound && trained > 0) {
    return without_state(folder_, trained, opened.status().what());
  }
  SI_ASSIGN_OR_RETURN(updater_, std::move(opened));
  // From here on the devices are locked.
  const std::optional<storage::RunId> run = engine::run_made_for(device_paths_);
  if (!run) {
    return Status(ErrorCode::kIo, "a device cannot be read that was just opened",
                  "Look at it with smartinf fsck",
                  base::ErrorPlace{device_paths_.front(), {}, {}, 0});
  }
  const bool expected = !run_start.discard && run_start.found;
  if (!updater_->fresh() && !(expected && *run == run_start.found->run)) {
    return Status(ErrorCode::kBusy, "another process has begun a run on the devices just now",
                  "Run it again to see whose they are");
  }
  record_ = {run->to_string(), device_paths_};
  return Status();
}

// The log tells one story: what is not of it goes to a file of its own, and is told of.
Status TorchTrainer::keep_history(const Job& job, const RunStart& run_start,
                                  base::StepNumber logged) {
  SI_RETURN_IF_ERROR(folder_.keep_recipe(job.recipe));
  if (memory_ == nullptr) SI_RETURN_IF_ERROR(folder_.keep_run_record(record_));
  std::string aside;
  if (!run_start.own_log) {
    SI_ASSIGN_OR_RETURN(aside, folder_.set_log_aside());
  }
  SI_ASSIGN_OR_RETURN(const RunFolder::LogCut cut, folder_.keep_log_until(step_));
  if (run_start.taken_over) {
    folder_.append_log(nlohmann::ordered_json{
        {"step", step_}, {"taken_over", record_.run}, {"from", run_start.from}}
                           .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    const std::string kept_in = aside.empty() ? cut.kept_in : aside;
    if (!kept_in.empty()) remark_ = "log: what is not of this run is in " + kept_in;
    return Status();
  }
  // In memory a step is written now and then only.
  if (memory_ == nullptr && !cut.kept_in.empty()) {
    base::log(
        base::LogLevel::kWarning,
        fmt::format("{} has steps to {}, but the devices hold step {}: they are an older copy, "
                    "or a drive has lost what it said was written. Training goes on from step "
                    "{}; the lines behind it are in {} now",
                    folder_.file(kLogFile), cut.last, step_, step_, cut.kept_in));
  }
  if (logged < step_) {
    base::log(base::LogLevel::kWarning,
              fmt::format("{} ends at step {}, and the devices hold step {}: the lines between are "
                          "missing",
                          folder_.file(kLogFile), logged, step_));
  }
  return Status();
}

Status TorchTrainer::start(const Job& job, const RunStart& run_start) {
  const TrainOptions& train = options_.train;
  for (const engine::DeviceOptions& device : job.updater.devices) {
    device_paths_.push_back(device.path);
  }
  if (train.where == OptimizerWhere::kMemory) {
    SI_ASSIGN_OR_RETURN(std::unique_ptr<MemoryUpdater> memory,
                        MemoryUpdater::open(job.updater.rule, space_, folder_.path()));
    memory_ = memory.get();
    updater_ = std::move(memory);
  } else {
    SI_RETURN_IF_ERROR(open_devices(job, run_start));
  }
  const base::StepNumber logged = logged_step(folder_.path());
  if (updater_->fresh() && logged > 0) return without_state(folder_, logged, "no state is there");
  gradient_type_ = job.updater.gradient_type;
  ring_ = job.updater.ring;
  if (job.updater.compress.on()) {
    compression_ = compress::describe_compression(job.updater.compress);
    if (job.updater.compress.residual_on_devices()) {
      residual_every_ = job.updater.compress.residual_every;
    }
  }

  std::error_code error;
  const std::string folder = std::filesystem::absolute(folder_.path(), error).lexically_normal();
  position_ = {0, options_.data.seed, options_.data.sequence, corpus_.digest(), folder};
  if (updater_->fresh()) {
    // Before there is a state that the folder would not know.
    if (memory_ == nullptr) SI_RETURN_IF_ERROR(folder_.keep_run_record(record_));
    const InitialWeights initial(options_.model, space_, train.seed);
    SI_RETURN_IF_ERROR(updater_->initialize(
        [&](uint64_t first, std::span<float> out) { initial.fill(first, out); },
        position_.to_json()));
  } else {
    SI_ASSIGN_OR_RETURN(const Position there, Position::from_json(updater_->client_metadata()));
    if (there.corpus != position_.corpus) {
      return Status(ErrorCode::kMismatch,
                    "data.paths: the training text is not what the run was started with",
                    "Bring back the same files, data.suffixes and data.validation_share, or choose "
                    "another train.run");
    }
    if (there.sequence != position_.sequence) {
      return different("data.sequence", std::to_string(position_.sequence),
                       std::to_string(there.sequence));
    }
    if (there.data_seed != position_.data_seed) {
      return different("data.seed", std::to_string(position_.data_seed),
                       std::to_string(there.data_seed));
    }
    position_.windows = there.windows;
  }
  step_ = first_ = residual_written_ = updater_->committed_step();
  // Where nothing is trained the folder stays as it is.
  if (step_ < train.steps) {
    SI_RETURN_IF_ERROR(keep_history(job, run_start, logged));
  } else if (step_ == train.steps) {
    SI_RETURN_IF_ERROR(folder_.keep_log_until(step_).status());
  }

  const auto count = static_cast<int64_t>(space_.count());
  host_weights_N_ = torch::empty(
      {count}, torch::dtype(scalar_type(weights_type_)).pinned_memory(!accelerator_.is_cpu()));
  SI_RETURN_IF_ERROR(
      updater_->load_weights(weights_type_, [this](uint64_t first) { return weights_at(first); }));
  weights_N_ = host_weights_N_.to(accelerator_);  // the same tensor when both are the CPU's
  model_ = std::make_unique<Model>(options_.model, space_, weights_N_, options_.data.sequence,
                                   train.checkpoint_activations);
  traffic_ = updater_->traffic();
  return Status();
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

Result<double> TorchTrainer::validation_loss() {
  return guarded("validation", [&]() -> Result<double> {
    if (corpus_.validation().count() == 0) {
      return Status(ErrorCode::kNotFound, "no data is held out",
                    "Set data.validation_share or data.validation_paths");
    }
    const torch::NoGradGuard no_grad;
    // Always the same windows, spread evenly over what is held out.
    const uint64_t held = (corpus_.validation().count() - 1) / options_.data.sequence;
    const uint64_t rows = options_.train.micro_batch;
    const uint64_t wanted = std::min(held, options_.train.validation_batches * rows);
    double sum = 0;
    for (uint64_t first = 0; first < wanted; first += rows) {
      std::vector<uint64_t> windows;
      for (uint64_t i = first; i < std::min(first + rows, wanted); ++i) {
        windows.push_back(i * held / wanted);
      }
      SI_ASSIGN_OR_RETURN(const Batch batch, read_windows(corpus_.validation(), windows));
      sum += model_->loss(batch.tokens_BT, batch.targets_BT).item<double>() *
             static_cast<double>(windows.size());
    }
    const double loss = sum / static_cast<double>(wanted);
    // Of a run that was trained further the log says nothing new.
    if (step_ <= options_.train.steps) folder_.append_validation(step_, loss);
    return loss;
  });
}

Result<std::string> TorchTrainer::sample() {
  return guarded("sample", [&]() -> Result<std::string> {
    const torch::NoGradGuard no_grad;
    const TrainOptions& train = options_.train;
    std::string text;
    std::vector<int64_t> tokens;
    if (corpus_.bytes()) {
      for (const char c : train.sample_prompt) tokens.push_back(static_cast<unsigned char>(c));
      text = train.sample_prompt;
    }
    if (tokens.empty()) tokens.push_back(corpus_.bytes() ? int64_t{kByteSeparator} : 0);
    for (uint32_t i = 0; i < train.sample_tokens; ++i) {
      const size_t seen = std::min<size_t>(tokens.size(), options_.data.sequence);
      const Tensor context_BT =
          torch::tensor(
              std::vector<int64_t>(tokens.end() - static_cast<std::ptrdiff_t>(seen), tokens.end()))
              .unsqueeze(0)
              .to(accelerator_);
      const Tensor last_V = model_->logits(context_BT)[0][-1].to(torch::kCPU, torch::kFloat64);
      int64_t next = last_V.argmax().item<int64_t>();
      if (train.sample_temperature > 0) {
        const Tensor chance_V = torch::softmax(last_V / train.sample_temperature, 0).cumsum(0);
        const double drawn = random_uniform(train.seed, i);
        next = std::min(torch::searchsorted(chance_V, drawn).item<int64_t>(), chance_V.size(0) - 1);
      }
      tokens.push_back(next);
      if (!corpus_.bytes()) {
        text += fmt::format("{} ", next);
      } else if (next == kByteSeparator) {
        break;  // the end of a file
      } else {
        text += static_cast<char>(next);
      }
    }
    return text;
  });
}

Result<std::optional<engine::CheckpointSummary>> TorchTrainer::checkpoint(
    const engine::StateProgress& progress) {
  using Made = std::optional<engine::CheckpointSummary>;
  return guarded("checkpoint", [&]() -> Result<Made> {
    SI_RETURN_IF_ERROR(updater_->flush());
    const uint64_t begin_ns = base::now_ns();
    engine::CheckpointOptions options;
    options.folder = options_.checkpoint.folder;
    options.keep = options_.checkpoint.keep;
    options.scratch_memory = updater_->scratch_memory();
    options.ring = ring_;
    options.progress = progress;
    Result<engine::CheckpointSummary> made = engine::checkpoint_open_run(device_paths_, options);
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
    SI_RETURN_IF_ERROR(updater_->flush());
    return memory_ != nullptr && step_ > first_ ? memory_->save() : Status();
  });
}

void TorchTrainer::report_traffic(StepReport& report) {
  const engine::UpdaterTraffic now = updater_->traffic();
  report.traffic = now.since(traffic_);
  traffic_ = now;
  const compress::CompressionSummary compression = updater_->compression();
  report.compressed_bytes = compression.bytes;
  report.density = compression.density;
  report.residual_norm = compression.residual_norm;
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
      precision_name(options_.train.precision), accelerator_.str()));
  lines.push_back("data: " + corpus_.describe());
  for (std::string& line : updater_->describe_devices()) lines.push_back("state: " + line);
  if (!compression_.empty()) lines.push_back("gradients: " + compression_);
  lines.push_back(fmt::format(
      "memory: {} weights in the host's memory{}, {} gradients and what compression keeps, {} "
      "buffers{}; activations and torch come on top",
      base::format_bytes(host_weights_N_.nbytes()),
      accelerator_.is_cpu() ? "" : " and once more on the GPU",
      base::format_bytes(updater_->gradient_memory_bytes()),
      base::format_bytes(updater_->memory_bytes()),
      updater_->state_cache_bytes() == 0
          ? ""
          : fmt::format(", {} of state", base::format_bytes(updater_->state_cache_bytes()))));
  if (!remark_.empty()) lines.push_back(remark_);
  return lines;
}

Result<RunStart> choose_start(const Job& job) {
  const bool chosen = !job.choice.take_over.empty() || !job.choice.start_over.empty();
  if (job.options.train.where != OptimizerWhere::kMemory) {
    std::vector<std::string> devices;
    for (const auto& device : job.updater.devices) devices.push_back(device.path);
    return choose_run(job.options.train.run, devices, job.choice);
  }
  if (!chosen) return RunStart{};
  return Status(ErrorCode::kInvalidArgument,
                "--take-over and --start-over are about states on devices, and optimizer.where is "
                "\"memory\"",
                "To start over, remove the run's folder");
}

}  // namespace

Result<std::unique_ptr<Trainer>> Trainer::open(const Job& job) {
  return guarded("start", [&]() -> Result<std::unique_ptr<Trainer>> {
    SI_RETURN_IF_ERROR(validate(job.options));
    give_tensors_their_own_pages();
    Options options = job.options;
    options.model = with_defaults(options.model);
    const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
    at::set_num_threads(
        static_cast<int>(options.train.threads != 0 ? options.train.threads : cores));

    SI_ASSIGN_OR_RETURN(const torch::Device accelerator,
                        choose_accelerator(options.train.accelerator));
    SI_ASSIGN_OR_RETURN(Corpus corpus, Corpus::open(options.data));
    if (options.model.vocabulary == 0) options.model.vocabulary = corpus.vocabulary();
    if (options.model.vocabulary < corpus.vocabulary()) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("model.vocabulary is {}, and the text has {} tokens",
                                options.model.vocabulary, corpus.vocabulary()),
                    fmt::format("Leave it out, or choose at least {}", corpus.vocabulary()));
    }
    if (options.model.vocabulary == 0) {
      return Status(ErrorCode::kInvalidArgument, "model.vocabulary is not given",
                    "Token files do not say it: set it to the tokenizer's size");
    }
    SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space, make_parameter_space(options.model));
    SI_ASSIGN_OR_RETURN(GroupedParameters parameters, group_parameters(space, options.train));
    SI_ASSIGN_OR_RETURN(const RunStart run_start, choose_start(job));
    SI_ASSIGN_OR_RETURN(RunFolder folder, RunFolder::open(options.train.run));
    if (options.checkpoint.folder.empty()) {
      options.checkpoint.folder = folder.file(kCheckpointsFolder);
    }
    // Checked up front, not after the first so many steps.
    if (options.checkpoint.every != 0) {
      SI_RETURN_IF_ERROR(engine::check_checkpoint_folder(options.checkpoint.folder)
                             .with_context("checkpoint.folder"));
    }
    auto trainer =
        std::make_unique<TorchTrainer>(std::move(options), std::move(corpus), std::move(folder),
                                       std::move(parameters), accelerator);
    SI_RETURN_IF_ERROR(trainer->start(job, run_start));
    return std::unique_ptr<Trainer>(std::move(trainer));
  });
}

}  // namespace smartinf::train
