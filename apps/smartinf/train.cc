// smartinf train: runs a recipe, one line a step; run again, it resumes.
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/memory.h"
#include "smartinf/train/product_rate.h"
#include "smartinf/train/ranks/device_ranks.h"
#include "smartinf/train/trainer.h"

#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/live_view.h"
#include "apps/smartinf/machine.h"
#include "apps/smartinf/progress.h"
#include "apps/smartinf/recipe_flags.h"
#include "apps/smartinf/restart.h"
#include "apps/smartinf/state_places.h"
#include "apps/smartinf/text_codec.h"
#include "apps/smartinf/trace_file.h"
#include "apps/smartinf/train_ranks.h"
#include "apps/smartinf/wear.h"

namespace smartinf::apps {
namespace {

using base::Result;
using base::Status;
using train::StepReport;
using train::Trainer;

/// Bytes of one of `steps` equal steps: "9.8 MiB weight", "61 MiB state + 16 KiB metadata", "0 B".
std::string by_kind(const std::array<uint64_t, base::kTrafficKinds>& bytes, uint64_t steps) {
  std::string text;
  for (size_t kind = 0; kind < bytes.size(); ++kind) {
    if (bytes[kind] == 0) continue;
    text +=
        fmt::format("{}{} {}", text.empty() ? "" : " + ", base::format_bytes(bytes[kind] / steps),
                    base::traffic_kind_name(static_cast<base::TrafficKind>(kind)));
  }
  return text.empty() ? base::format_bytes(0) : text;
}

// The output of a run: for people, with a live view on a terminal, or as JSON lines.
class Screen {
 public:
  /// silent: of another rank than the first.
  Screen(bool json, bool silent, const train::TrainOptions& train, base::StepNumber first)
      : json_(json),
        silent_(silent),
        steps_(train.steps),
        log_every_(train.log_every),
        first_(first) {
    if (!json && !silent && LiveView::possible()) view_.emplace(steps_, first_);
  }

  void note(const std::string& text) {
    if (!json_) print(text);
  }

  void step(const StepReport& report) {
    reports_ += report.skipped.empty() ? 1 : 0;
    add_traffic(report.traffic);
    compressed_bytes_ += report.compressed_bytes;
    if (!report.skipped.empty()) {
      print(json_ ? report.to_json()
                  : fmt::format("step {}: no update: {}", report.step, report.skipped));
      return;
    }
    const bool last = report.step == steps_;
    const bool in_view = view_ && log_every_ == 1 && !last;
    const bool shown =
        !in_view && (report.step % log_every_ == 0 || report.step == first_ + 1 || last);
    if (shown && json_) print(report.to_json());
    if (shown && !json_) {
      print(fmt::format(
          "step {:>{}}/{}  loss {:.4f}  grad norm {:.3f}  lr {:.2e}  "
          "{} (forward {} backward {} update {})  "
          "{:.0f} tokens/s{}",
          report.step, std::to_string(steps_).size(), steps_, report.loss, report.gradient_norm,
          report.lr, base::format_seconds(report.seconds), base::format_seconds(report.forward_s),
          base::format_seconds(report.backward_s), base::format_seconds(report.update_s),
          report.tokens_per_s(),
          view_ || last ? ""
                        : ", " + time_left(start_ns_, report.step - first_, steps_ - report.step)));
    }
    if (!json_ && !report.offload_decision.empty()) {
      print("activations: " + report.offload_decision);
    }
    if (view_) view_->add(report);
  }

  void add_traffic(const engine::UpdaterTraffic& traffic) {
    host_link_ += traffic.host_link;
    store_ += traffic.store;
  }

  /// Prints what was the same in every step, once, at the end.
  void totals() {
    if (json_ || reports_ == 0) return;
    print(fmt::format(
        "bytes of a step: host link up {}, down {}; drives read {}, written {}{}",
        by_kind(host_link_.up_bytes, reports_), by_kind(host_link_.down_bytes, reports_),
        by_kind(store_.up_bytes, reports_), by_kind(store_.down_bytes, reports_),
        compressed_bytes_ == 0 ? ""
                               : fmt::format("; compressed gradients {}",
                                             base::format_bytes(compressed_bytes_ / reports_))));
    if (const uint64_t bytes = engine::peak_memory_bytes(); bytes > 0) {
      print(fmt::format("memory: at most {} of this process were in the host's memory",
                        base::format_bytes(bytes)));
    }
  }

  void validation(base::StepNumber at, const train::Validation& made) {
    if (!made.loss && made.sets.empty()) return;
    if (json_) return print(made.to_json(at));
    if (made.loss) {
      if (view_) view_->add_validation(*made.loss);
      print(fmt::format("step {}: validation loss {:.4f} nats per token", at, *made.loss));
    }
    for (const auto& [name, loss] : made.sets) {
      print(fmt::format("step {}: loss on {} {:.4f} nats per token", at, name, loss));
    }
  }

  void resumed(base::StepNumber step, const std::vector<config::KeyChange>& changes) {
    if (json_) {
      nlohmann::ordered_json line{{"resumed_after_step", step}};
      line["steps_left"] = steps_ - std::min(step, steps_);
      line["changed"] = nlohmann::ordered_json::object();
      for (const auto& [key, before, now] : changes) line["changed"][key] = {before, now};
      return print(line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    }
    if (!changes.empty()) print("changed since the last start:");
    for (const auto& [key, before, now] : changes) {
      print(fmt::format("  {}: {} -> {}", key, before, now));
    }
    if (step < steps_) {
      print(fmt::format("resuming at step {}", step + 1));
    } else {
      print(fmt::format("nothing to train: the run is at step {}, and train.steps is {}", step,
                        steps_));
    }
  }

  void lost(const Status& why, double seconds) {
    if (json_) {
      const nlohmann::ordered_json line{{"lost", why.to_string()}, {"restart_seconds", seconds}};
      return print(line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    }
    print(fmt::format(
        "device lost: {}\ntrying for {} to open it again and to go on from the committed step",
        why.to_string(), base::format_seconds(seconds)));
  }

  void checkpoint(const engine::CheckpointSummary& made) {
    if (json_) {
      return print(nlohmann::ordered_json{{"step", made.step},
                                          {"checkpoint", made.path},
                                          {"state_bytes", made.state_bytes},
                                          {"cloned", made.cloned},
                                          {"removed", made.removed}}
                       .dump());
    }
    print(fmt::format("step {}: checkpoint {}, {}{}", made.step, made.path,
                      base::format_bytes(made.state_bytes),
                      made.existed  ? ", was there already"
                      : made.cloned ? ", shares its blocks with the devices"
                                    : ", copied"));
    for (const std::string& removed : made.removed) print("deleted " + removed);
  }

  void wear(const engine::DeviceOptions& device, uint64_t written_bytes) {
    const DriveFacts drive = drive_facts(device.path);
    if (!json_) {
      return print(fmt::format("written to {}: {}", device.path,
                               wear_text(written_bytes, device.rated_endurance_bytes, drive)));
    }
    nlohmann::ordered_json line{{"device", device.path}, {"bytes_written_ever", written_bytes}};
    if (device.rated_endurance_bytes > 0) {
      line["rated_endurance_bytes"] = device.rated_endurance_bytes;
    }
    if (drive.wear_share) line["drive_wear_share"] = *drive.wear_share;
    if (drive.written_bytes) line["drive_bytes_written"] = *drive.written_bytes;
    print(line.dump());
  }

  /// Before something else writes to the terminal.
  void clear_view() {
    if (view_) view_->clear();
  }

  void samples(base::StepNumber at, const std::vector<std::string>& texts) {
    using Json = nlohmann::ordered_json;
    if (json_) {
      const Json line{{"step", at}, {"samples", texts}};
      return print(line.dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    for (const std::string& text : texts) print(fmt::format("step {}: sample:\n{}", at, text));
  }

 private:
  void print(const std::string& line) {
    if (silent_) return;
    if (view_) return view_->print(line);
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }

  bool json_;
  bool silent_;
  std::optional<LiveView> view_;
  uint64_t steps_;
  uint64_t log_every_;
  base::StepNumber first_;
  uint64_t start_ns_ = base::now_ns();
  // Sums over all steps of this start.
  uint64_t reports_ = 0;
  uint64_t compressed_bytes_ = 0;
  base::TrafficReading host_link_;
  base::TrafficReading store_;
};

// The model's continuations of train.sample_prompts, at each validation.
class Samples {
 public:
  explicit Samples(const train::Ranks& ranks) : ranks_(ranks) {}

  /// Opens the prompts. A failure costs the run nothing: a warning says why.
  void open(const Trainer& trainer) {
    const train::TrainOptions& options = trainer.options().train;
    if (options.sample_prompts.empty() || options.sample_tokens == 0) return;
    wanted_ = true;
    if (!ranks_.first()) return;
    Result<TextCodec> codec = TextCodec::open(trainer.text_form());
    if (!codec.ok()) return warn(codec.status());
    for (const std::string& text : options.sample_prompts) {
      Result<std::vector<int64_t>> prompt = codec->encode(text);
      if (!prompt.ok()) return warn(prompt.status());
      if (prompt->empty() || prompt->size() >= trainer.options().data.sequence) {
        return warn(Status(base::ErrorCode::kInvalidArgument,
                           fmt::format("one has {} tokens", prompt->size()),
                           "Choose prompts of at least one token, shorter than data.sequence"));
      }
      prompts_.push_back(std::move(*prompt));
    }
    codec_ = std::move(*codec);
  }

  Status show(Trainer& trainer, Screen& screen, const Interrupt& interrupt) {
    if (!wanted_) return Status();
    // Ranks all take part, and the first one's prompts count.
    const bool go_on = codec_ && !interrupt.requested();
    if (ranks_.alone() && !go_on) return Status();
    const auto prompts = go_on ? std::span(std::as_const(prompts_)) : std::span<const Tokens>();
    SI_ASSIGN_OR_RETURN(auto made, trainer.sample(prompts, interrupt.token()));
    if (made.empty()) return Status();
    std::vector<std::string> texts;
    for (size_t i = 0; i < made.size(); ++i) {
      made[i].insert(made[i].begin(), prompts_[i].begin(), prompts_[i].end());
      SI_ASSIGN_OR_RETURN(texts.emplace_back(), codec_->decode(made[i]));
    }
    screen.samples(trainer.step(), texts);
    return Status();
  }

 private:
  static void warn(Status status) {
    base::log(base::LogLevel::kWarning,
              std::move(status).with_context("train.sample_prompts: no samples").to_string());
  }

  using Tokens = std::vector<int64_t>;
  const train::Ranks& ranks_;
  bool wanted_ = false;  // on all ranks, or on none
  std::optional<TextCodec> codec_;
  std::vector<Tokens> prompts_;
};

/// The trainer's own track, beside those of devices and links.
constexpr uint32_t kTrainerTrack = 0;

void add_spans(const StepReport& report, csd::Trace& trace) {
  for (const train::Phase& phase : report.phases) {
    trace.record({phase.name, kTrainerTrack, report.step, phase.begin_ns, phase.end_ns});
  }
}

bool due(uint64_t every, base::StepNumber step) { return every != 0 && step % every == 0; }

/// A run, and who looks at it.
struct Training {
  const train::Ranks& ranks;
  const Interrupt& interrupt;
  Trainer& trainer;
  Screen screen;
  Samples samples;
};

/// A copy that cannot be made costs the run nothing but itself.
Status keep_checkpoint(Training& training, std::optional<double> best_with = {}) {
  auto& [ranks, interrupt, trainer, screen, samples] = training;
  // Several ranks stop together, before the next step.
  Progress progress("copying the state", ranks.alone() ? interrupt.token() : std::stop_token());
  const engine::StateProgress show = [&](uint64_t done, uint64_t total) {
    return training.ranks.first() ? progress(done, total) : Status();
  };
  const Result<std::optional<engine::CheckpointSummary>> made =
      best_with ? trainer.keep_best(*best_with, show) : trainer.checkpoint(show);
  progress.clear();
  if (made.ok() && *made) screen.checkpoint(**made);
  return made.status();
}

Status validate(Training& training) {
  auto& [ranks, interrupt, trainer, screen, samples] = training;
  SI_ASSIGN_OR_RETURN(const train::Validation made, trainer.validate());
  screen.validation(trainer.step(), made);
  SI_RETURN_IF_ERROR(samples.show(trainer, screen, interrupt));
  if (!made.loss || !trainer.options().train.keep_best || trainer.step() == 0) return Status();
  screen.clear_view();
  return keep_checkpoint(training, made.loss);
}

/// Shows the wear of the drives of this rank's devices: another's path may be something else here.
void show_wear(const train::Job& job, Screen& screen) {
  if (job.options.train.where == train::OptimizerWhere::kMemory) return;
  const auto sources = engine::local_sources(job.updater);
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!job.ranks.alone() && job.updater.devices[i].rank != job.ranks.rank()) continue;
    const Result<storage::StoreSummary> summary = sources[i]->summarize();
    if (!summary.ok()) continue;
    screen.wear(job.updater.devices[i], summary->bytes_written_ever);
  }
}

Status train_steps(Training& training, csd::Trace* trace) {
  auto& [ranks, interrupt, trainer, screen, samples] = training;
  const train::TrainOptions& options = trainer.options().train;
  if (options.validate_at_start && trainer.step() == 0) SI_RETURN_IF_ERROR(validate(training));
  while (trainer.step() < options.steps) {
    SI_ASSIGN_OR_RETURN(const StepReport report, trainer.train_step(interrupt.token()));
    screen.step(report);
    if (trace != nullptr) add_spans(report, *trace);
    const bool updated = report.skipped.empty();
    if (updated && due(trainer.options().checkpoint.every, report.step)) {
      screen.clear_view();
      SI_RETURN_IF_ERROR(keep_checkpoint(training));
    }
    if (updated && due(options.validate_every, report.step) && report.step < options.steps) {
      SI_RETURN_IF_ERROR(validate(training));
    }
  }
  return Status();
}

/// Keys whose values differ from those of the recipe that the run's folder has kept until now.
std::vector<config::KeyChange> changes_of(const config::LoadedRecipe& loaded) {
  const std::string& run = loaded.recipe.options.train.run;
  if (!has_begun(run)) return {};
  Result<config::LoadedRecipe> before = load_run(run);
  if (before.ok()) {
    config::Recipe now = loaded.recipe;
    config::make_inputs_absolute(now);
    config::make_inputs_absolute(before->recipe);
    return config::changed_keys(before->recipe, now);
  }
  base::log(base::LogLevel::kWarning,
            before.status().to_string() +
                " The keys that have changed since the last start cannot be shown.");
  return {};
}

int print_plan(config::LoadedRecipe& loaded, bool start_over) {
  Interrupt interrupt;
  const Result<train::Ranks> met = meet_ranks(loaded, interrupt);
  if (!met.ok()) return fail({}, met.status());
  const train::Ranks& ranks = *met;
  std::string note;
  const Status settled = settle_precision(loaded, ranks, start_over, note);
  if (!settled.ok()) return fail(ranks, settled);
  if (!note.empty() && ranks.first()) fmt::print("{}\n", note);
  const Status made = make_data(loaded, ranks, /*start_over=*/false, /*quiet=*/true, interrupt);
  if (!made.ok()) return fail(ranks, made);
  std::string stages;
  const Status divided = settle_stages(loaded, ranks, stages);
  if (!divided.ok()) return fail(ranks, divided);
  if (!stages.empty() && ranks.first()) fmt::print("{}\n", stages);
  train::Job job{loaded.recipe.options, loaded.recipe.updater, {}, {}, {}};
  Result<std::vector<engine::DeviceOptions>> devices =
      train::share_out_devices(job.updater.devices, ranks.world());
  if (!devices.ok()) return fail(ranks, devices.status());
  job.updater.devices = std::move(*devices);
  job.ranks = ranks;
  const Result<std::vector<std::string>> lines = Trainer::describe_memory(job);
  if (!lines.ok()) return fail(ranks, lines.status());
  for (const std::string& line : *lines) {
    if (ranks.first()) fmt::print("{}\n", line);
  }
  return kExitDone;
}

/// Opens a record of what the trainer does, for a file; null: nothing is recorded. Checked up
/// front, not after the last step.
Result<std::shared_ptr<csd::Trace>> open_trace(const std::string& path) {
  if (path.empty()) return std::shared_ptr<csd::Trace>();
  auto trace = std::make_shared<csd::Trace>();
  SI_CHECK(trace->add_track({"trainer", "step", "step"}) == kTrainerTrack, "the first track");
  SI_RETURN_IF_ERROR(write_trace(path, *trace).with_context("train.trace"));
  return trace;
}

/// Trains to the end, or until somebody stops it, and returns an exit code. step: how far it came.
/// Errors: what ended it.
Result<int> run_trainer(const train::Job& job, std::unique_ptr<Trainer> opened, Training& training,
                        base::StepNumber& step) {
  auto& [ranks, interrupt, trainer, screen, samples] = training;
  const train::TrainOptions& options = trainer.options().train;
  if (trainer.step() < options.steps) samples.open(trainer);
  csd::Trace* trace = job.updater.trace.get();
  Status status = train_steps(training, trace);
  const bool interrupted = status.code() == base::ErrorCode::kCancelled;
  screen.clear_view();
  step = trainer.step();
  if (status.ok() || interrupted) {
    SI_ASSIGN_OR_RETURN(const engine::UpdaterTraffic rest, trainer.finish());
    screen.add_traffic(rest);
  }
  if (trace != nullptr) {
    if (!status.ok() && !interrupted) opened.reset();  // its devices record until they are closed
    const std::string& path = job.options.train.trace;
    const Status written = write_trace(path, *trace);
    if (status.ok()) status = written;
    if (trace->dropped() > 0) {
      screen.note(fmt::format("{}: the trace is full; the last {} events were left out", path,
                              trace->dropped()));
    }
  }
  if (interrupted) {
    screen.totals();
    show_wear(job, screen);
    screen.note(fmt::format(
        "stopped at step {}, which is committed; run the command again to resume", step));
    return kExitInterrupted;
  }
  SI_RETURN_IF_ERROR(status);
  SI_RETURN_IF_ERROR(validate(training));
  screen.totals();
  show_wear(job, screen);
  screen.note(
      fmt::format("done: smartinf export {0} --out DIR makes a folder for transformers, smartinf "
                  "generate {0} --prompt TEXT continues a text",
                  options.run));
  return kExitDone;
}

struct TrainFlags {
  RecipeFlags recipe;
  std::string trace;
  train::RunChoice choice;
  bool print_plan = false;
  bool json = false;
  bool verbose = false;
  std::vector<uint64_t> restarted;  // the members of a Restart

  Restart restart() const {
    return restarted.empty() ? Restart() : Restart{restarted[0], restarted[1], restarted[2]};
  }
};

/// After a loss: this process becomes the next start, or says why it does not.
int go_on(const config::LoadedRecipe& loaded, const TrainFlags& flags, Restart restart,
          const Status& why, Interrupt& interrupt) {
  Status ended = wait_for_try(restart, loaded.recipe.restart_seconds, why, interrupt);
  ++restart.tries;
  if (ended.ok()) {
    ended = begin_again(loaded.recipe.options.train.run, flags.json, flags.verbose, restart);
  }
  return report(ended);
}

/// The recipe's text as the run's folder keeps it; of a training that goes on, what is there.
Result<std::string> recipe_text(const config::LoadedRecipe& loaded, const TrainFlags& flags) {
  if (flags.restarted.empty()) {
    config::LoadedRecipe kept = loaded;
    config::make_inputs_absolute(kept.recipe);
    return config::print_recipe(kept);
  }
  constexpr uint64_t kBytesMax = uint64_t{1} << 24;
  return base::read_text_file(loaded.path, "cannot read the recipe", kBytesMax);
}

int run_train(config::LoadedRecipe& loaded, const TrainFlags& flags) {
  Interrupt interrupt;
  const bool restarted = !flags.restarted.empty();
  const Result<train::Ranks> met = meet_ranks(loaded, interrupt);
  if (!met.ok()) return fail({}, met.status());
  interrupt.end_at_once(restarted);
  const train::Ranks& ranks = *met;
  std::string precision;
  const Status settled =
      settle_precision(loaded, ranks, !flags.choice.start_over.empty(), precision);
  if (!settled.ok()) return fail(ranks, settled);
  const Result<std::string> recipe = recipe_text(loaded, flags);
  if (!recipe.ok()) return fail(ranks, recipe.status());
  std::vector<config::KeyChange> changes;
  if (ranks.first() && !restarted) changes = changes_of(loaded);
  const bool start_over = !flags.choice.start_over.empty();
  const Status made = make_data(loaded, ranks, start_over, flags.json, interrupt);
  if (!made.ok()) return fail(ranks, made);
  std::string stages;
  const Status divided = settle_stages(loaded, ranks, stages);
  if (!divided.ok()) return fail(ranks, divided);
  train::Job job{loaded.recipe.options, loaded.recipe.updater, *recipe, flags.choice, {}};
  Result<std::vector<engine::DeviceOptions>> devices =
      train::share_out_devices(job.updater.devices, ranks.world());
  if (!devices.ok()) return fail(ranks, devices.status());
  job.updater.devices = std::move(*devices);
  job.ranks = ranks;
  std::string& trace_path = job.options.train.trace;
  if (ranks.first() || train::names_rank(trace_path)) {
    trace_path = train::with_rank(trace_path, ranks.rank());
    Result<std::shared_ptr<csd::Trace>> trace = open_trace(trace_path);
    if (!trace.ok()) return fail(ranks, trace.status());
    job.updater.trace = std::move(*trace);
  }
  Progress progress(
      job.options.model.from.empty() ? "making the first weights" : "reading the model's weights",
      interrupt.token());
  job.progress = [&](uint64_t done, uint64_t total) {
    return ranks.first() ? progress(done, total) : Status();
  };
  Result<std::unique_ptr<Trainer>> opened = Trainer::open(job);
  progress.clear();
  if (!opened.ok() && restarted && may_come_again(opened.status())) {
    return go_on(loaded, flags, flags.restart(), opened.status(), interrupt);
  }
  if (!opened.ok()) return fail(ranks, opened.status());
  interrupt.end_at_once(false);
  Trainer& trainer = **opened;
  const base::StepNumber first = trainer.step();
  Training training{ranks, interrupt, trainer,
                    Screen(flags.json, !ranks.first(), trainer.options().train, first),
                    Samples(ranks)};
  if (!precision.empty()) training.screen.note(precision);
  if (!stages.empty()) training.screen.note(stages);
  for (const std::string& line : trainer.describe()) training.screen.note(line);
  if (first > 0 || restarted) training.screen.resumed(first, changes);
  // Where nothing was left to train, the folder may have another recipe.
  const bool kept = restarted || first < trainer.options().train.steps;
  base::StepNumber step = first;
  const Result<int> code = run_trainer(job, std::move(*opened), training, step);
  if (code.ok()) return *code;
  const double seconds = loaded.recipe.restart_seconds;
  if (!is_lost(code.status()) || seconds == 0 || !kept || !ranks.alone() || interrupt.requested()) {
    return fail(ranks, code.status(), /*started=*/true);
  }
  training.screen.lost(code.status(), seconds);
  // The commit of the last step may have been under way.
  const base::StepNumber committed = std::max(first, step - std::min<base::StepNumber>(step, 1));
  Restart restart = flags.restart();
  if (!restarted || committed > restart.step) restart = {base::now_ns(), committed, 0};
  return go_on(loaded, flags, restart, code.status(), interrupt);
}

}  // namespace

void add_train(CLI::App& app, const Overrides& overrides, Run& run) {
  CLI::App* command = app.add_subcommand("train", kTrainSummary);
  auto flags = std::make_shared<TrainFlags>();
  add_recipe_flags(*command, flags->recipe);
  command
      ->add_option("--trace", flags->trace,
                   "Chrome trace to write, for ui.perfetto.dev (train.trace)")
      ->type_name("FILE");
  CLI::Option* take_over =
      command
          ->add_option("--take-over", flags->choice.take_over,
                       "Resume in this run's folder from a state that another run has left on the "
                       "devices, or that was restored; RUN is the first 8 digits of its run id")
          ->type_name("RUN");
  command
      ->add_option(
          "--start-over", flags->choice.start_over,
          "Delete the state of this run from the devices and start a new run; RUN is the first 8 "
          "digits of its run id")
      ->type_name("RUN")
      ->excludes(take_over);
  command->add_flag("--print-plan", flags->print_plan,
                    "Show what would be in memory and what would come from the devices, then exit");
  command->add_flag("--json", flags->json, "Print one JSON object for each line of text");
  command->add_option("--restarted", flags->restarted)->expected(3)->group("");  // begin_again()
  command->footer(
      "Examples:\n"
      "  smartinf train recipes/quickstart.toml\n"
      "  smartinf train recipes/quickstart.toml --train.run runs/mine --train.steps 200\n"
      "  smartinf train recipes/quickstart.toml --trace run.trace.json\n"
      "  smartinf train large.toml --memory.host 16GB --print-plan\n"
      "  smartinf train recipes/quickstart.toml --device.0.path /mnt/a --device.1.path /mnt/b\n\n"
      "Ctrl-C stops at a committed step, with exit code 130; a second Ctrl-C stops at once.");
  command->callback([flags, &app, &overrides, &run] {
    flags->verbose = app.get_option("--verbose")->count() > 0;
    run = [flags, &overrides] {
      config::LoadedRecipe loaded;
      Overrides values = overrides;
      if (!flags->trace.empty()) values.push_back({"train.trace", flags->trace});
      if (const auto code = read_recipe(flags->recipe, values, loaded)) return *code;
      if (const std::string& teacher = loaded.recipe.distill.teacher; !teacher.empty()) {
        return report(
            Status(
                base::ErrorCode::kInvalidArgument,
                fmt::format("teacher.from is \"{}\", but this trains without a teacher", teacher),
                "Run smartinf distill, or leave it out"),
            kExitUsage);
      }
      if (flags->print_plan) return print_plan(loaded, !flags->choice.start_over.empty());
      return run_train(loaded, *flags);
    };
  });
}

std::optional<int> run_with_torch(std::string_view /*command*/, char** /*arguments*/) {
  return std::nullopt;
}

}  // namespace smartinf::apps
