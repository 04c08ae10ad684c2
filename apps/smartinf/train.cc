// smartinf train: runs a recipe, one line a step; run again, it goes on.
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/summary.h"
#include "smartinf/train/trainer.h"

#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/machine.h"
#include "apps/smartinf/progress.h"
#include "apps/smartinf/recipe_flags.h"
#include "apps/smartinf/trace_file.h"
#include "apps/smartinf/wear.h"

namespace smartinf::apps {
namespace {

using base::Result;
using base::Status;
using train::StepReport;
using train::Trainer;

/// "9.8 MiB weight", "61 MiB state + 16 KiB metadata", "0 B".
std::string by_kind(const std::array<uint64_t, base::kTrafficKinds>& bytes) {
  std::string text;
  for (size_t kind = 0; kind < bytes.size(); ++kind) {
    if (bytes[kind] == 0) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : " + ", base::format_bytes(bytes[kind]),
                        base::traffic_kind_name(static_cast<base::TrafficKind>(kind)));
  }
  return text.empty() ? base::format_bytes(0) : text;
}

// What a run says: for people, with a bar on a terminal, or as JSON lines.
class Screen {
 public:
  Screen(bool json, uint64_t steps, base::StepNumber first)
      : json_(json), bar_(!json && isatty(STDOUT_FILENO) != 0), steps_(steps), first_(first) {}

  static std::string compression_text(const StepReport& report) {
    if (report.compressed_bytes == 0) return "";
    return fmt::format("  gradients {} at ratio {:.3g}, residual {:.3f}",
                       base::format_bytes(report.compressed_bytes), report.compress_ratio,
                       report.residual_norm);
  }

  void note(const std::string& text) const {
    if (!json_) print(text);
  }

  void step(const StepReport& report) const {
    if (json_) return print(report.to_json());
    if (!report.skipped.empty()) {
      print(fmt::format("step {}: no update: {}", report.step, report.skipped));
      return;
    }
    print(
        fmt::format(
            "step {:>{}}/{}  loss {:.4f}  norm {:.3f}  lr {:.2e}  {:.0f} tokens/s  forward {:.3f} "
            "backward {:.3f} update {:.3f} s  link up {} down {}  drives read {} written {}",
            report.step, std::to_string(steps_).size(), steps_, report.loss, report.gradient_norm,
            report.lr, report.tokens_per_s(), report.forward_s, report.backward_s, report.update_s,
            by_kind(report.traffic.host_link.up_bytes),
            by_kind(report.traffic.host_link.down_bytes), by_kind(report.traffic.store.up_bytes),
            by_kind(report.traffic.store.down_bytes)) +
        compression_text(report));
    draw_bar(report.step);
  }

  void validation(base::StepNumber at, double loss) const {
    if (json_) {
      print(nlohmann::ordered_json{{"step", at}, {"validation_loss", loss}}.dump());
    } else {
      print(fmt::format("step {}: validation loss {:.4f} nats per token", at, loss));
    }
  }

  void checkpoint(const engine::CheckpointSummary& made) const {
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

  void wear(const engine::DeviceOptions& device, uint64_t written_bytes) const {
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
  void clear_bar() const {
    if (!bar_) return;
    fmt::print("\r\x1b[K");
    std::fflush(stdout);
  }

  void sample(const std::string& text) const {
    if (!json_) return print("sample:\n" + text);
    using Json = nlohmann::ordered_json;
    print(Json{{"sample", text}}.dump(-1, ' ', false, Json::error_handler_t::replace));
  }

 private:
  void print(const std::string& line) const {
    // The bar is on the last line: a new line is written over it.
    fmt::print("{}{}\n", bar_ ? "\r\x1b[K" : "", line);
    std::fflush(stdout);
  }

  void draw_bar(base::StepNumber step) const {
    if (!bar_ || step >= steps_) return;
    constexpr uint64_t kWidth = 40;
    const double left_s = base::seconds_since(start_ns_) / static_cast<double>(step - first_) *
                          static_cast<double>(steps_ - step);
    const uint64_t full = kWidth * step / steps_;
    fmt::print("[{:#>{}}{:>{}}] {}%, {} left", "", full, "", kWidth - full, 100 * step / steps_,
               base::format_seconds(left_s));
    std::fflush(stdout);
  }

  bool json_;
  bool bar_;
  uint64_t steps_;
  base::StepNumber first_;
  uint64_t start_ns_ = base::now_ns();
};

/// The trainer's own track, beside those of devices and links.
constexpr uint32_t kTrainerTrack = 0;

void add_spans(const StepReport& report, csd::Trace& trace) {
  for (const train::Phase& phase : report.phases) {
    trace.record({phase.name, kTrainerTrack, report.step, phase.begin_ns, phase.end_ns});
  }
}

bool due(uint64_t every, base::StepNumber step) { return every != 0 && step % every == 0; }

Status validate(Trainer& trainer, const Screen& screen) {
  const Result<double> loss = trainer.validation_loss();
  if (loss.ok()) screen.validation(trainer.step(), *loss);
  // No data held out is a choice.
  return loss.status().code() == base::ErrorCode::kNotFound ? Status() : loss.status();
}

/// A copy that cannot be made costs the run nothing but itself.
Status keep_checkpoint(Trainer& trainer, const Screen& screen, const Interrupt& interrupt) {
  Progress progress("copying the state", interrupt.token());
  const Result<std::optional<engine::CheckpointSummary>> made =
      trainer.checkpoint([&](uint64_t done, uint64_t total) { return progress(done, total); });
  progress.clear();
  if (made.ok() && *made) screen.checkpoint(**made);
  return made.status();
}

void show_wear(const config::LoadedRecipe& loaded, const Screen& screen) {
  if (loaded.recipe.options.train.where == train::OptimizerWhere::kMemory) return;
  for (const engine::DeviceOptions& device : loaded.recipe.updater.devices) {
    const Result<storage::StoreSummary> summary = storage::summarize(device.path);
    if (summary.ok()) screen.wear(device, summary->bytes_written_ever);
  }
}

Status train_steps(Trainer& trainer, const Screen& screen, const Interrupt& interrupt,
                   csd::Trace* trace) {
  const train::TrainOptions& options = trainer.options().train;
  while (trainer.step() < options.steps) {
    SI_ASSIGN_OR_RETURN(const StepReport report, trainer.train_step(interrupt.token()));
    screen.step(report);
    if (trace != nullptr) add_spans(report, *trace);
    const bool updated = report.skipped.empty();
    if (updated && due(trainer.options().checkpoint.every, report.step)) {
      screen.clear_bar();
      SI_RETURN_IF_ERROR(keep_checkpoint(trainer, screen, interrupt));
    }
    if (updated && due(options.validate_every, report.step) && report.step < options.steps) {
      SI_RETURN_IF_ERROR(validate(trainer, screen));
    }
  }
  return Status();
}

int run_train(const config::LoadedRecipe& loaded, bool json) {
  Interrupt interrupt;
  train::Job job{loaded.recipe.options, loaded.recipe.updater, config::print_recipe(loaded)};
  const std::string& trace_path = job.options.train.trace;
  std::shared_ptr<csd::Trace> trace;
  if (!trace_path.empty()) {
    trace = std::make_shared<csd::Trace>();
    SI_CHECK(trace->add_track({"trainer", "step", "step"}) == kTrainerTrack, "the first track");
    job.updater.trace = trace;
    // Told now, not after the last step.
    Status written = write_trace(trace_path, *trace);
    if (!written.ok()) return report(std::move(written).with_context("train.trace"));
  }
  Result<std::unique_ptr<Trainer>> opened = Trainer::open(job);
  if (!opened.ok()) {
    const bool wrong_value = opened.status().code() == base::ErrorCode::kInvalidArgument;
    return report(opened.status(), wrong_value ? kExitUsage : kExitFailed);
  }
  Trainer& trainer = **opened;
  const train::TrainOptions& options = trainer.options().train;
  const Screen screen(json, options.steps, trainer.step());
  for (const std::string& line : trainer.describe()) screen.note(line);
  if (trainer.step() > 0) screen.note(fmt::format("going on after step {}", trainer.step()));

  Status status = train_steps(trainer, screen, interrupt, trace.get());
  const bool interrupted = status.code() == base::ErrorCode::kCancelled;
  screen.clear_bar();
  if (status.ok() || interrupted) {
    const Status finished = trainer.finish();
    if (!finished.ok()) return report(finished);
  }
  if (trace != nullptr) {
    if (!status.ok() && !interrupted) opened->reset();  // its devices record until they are closed
    const Status written = write_trace(trace_path, *trace);
    if (status.ok()) status = written;
    if (trace->dropped() > 0) {
      screen.note(
          fmt::format("{}: full; the last {} events were left out", trace_path, trace->dropped()));
    }
  }
  if (interrupted) {
    show_wear(loaded, screen);
    screen.note(
        fmt::format("stopped at step {}, committed; run it again to go on", trainer.step()));
    return kExitInterrupted;
  }
  if (!status.ok()) return report(status);

  status = validate(trainer, screen);
  if (!status.ok()) return report(status);
  if (options.sample_tokens > 0 && !interrupt.requested()) {
    const Result<std::string> text = trainer.sample();
    if (!text.ok()) return report(text.status());
    screen.sample(*text);
  }
  show_wear(loaded, screen);
  screen.note(fmt::format("done: smartinf export {} --out DIR makes a folder for transformers",
                          options.run));
  return kExitDone;
}

}  // namespace

void add_train(CLI::App& app, const Overrides& overrides, Run& run) {
  CLI::App* command = app.add_subcommand(
      "train", "Train a model; run again, it goes on after the last committed step");
  struct Flags {
    RecipeFlags recipe;
    std::string trace;
    bool json = false;
  };
  auto flags = std::make_shared<Flags>();
  add_recipe_flags(*command, flags->recipe);
  command->add_option("--trace", flags->trace, "Write a trace for ui.perfetto.dev (train.trace)")
      ->type_name("FILE");
  command->add_flag("--json", flags->json, "One JSON object a line instead of text");
  command->footer(
      "Examples:\n"
      "  smartinf train recipes/quickstart.toml\n"
      "  smartinf train recipes/quickstart.toml --train.run runs/mine --train.steps 200\n"
      "  smartinf train recipes/quickstart.toml --trace run.trace.json\n"
      "  smartinf train recipes/quickstart.toml --device.0.path /mnt/a --device.1.path /mnt/b\n\n"
      "Ctrl-C stops at a committed step, exit code 130; a second one at once.");
  command->callback([flags, &overrides, &run] {
    run = [flags, &overrides] {
      config::LoadedRecipe loaded;
      Overrides values = overrides;
      if (!flags->trace.empty()) values.push_back({"train.trace", flags->trace});
      if (const auto code = read_recipe(flags->recipe, values, loaded)) return *code;
      return run_train(loaded, flags->json);
    };
  });
}

}  // namespace smartinf::apps
