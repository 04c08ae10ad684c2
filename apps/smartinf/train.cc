// smartinf train: runs a recipe, one line a step; run again, it goes on.
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"
#include "smartinf/train/trainer.h"

#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/recipe_flags.h"
#include "apps/smartinf/trace_file.h"

namespace smartinf::apps {
namespace {

using base::Result;
using base::Status;
using train::StepReport;
using train::Trainer;

// What a run says: for people, with a bar on a terminal, or as JSON lines.
class Screen {
 public:
  Screen(bool json, uint64_t steps, base::StepNumber first)
      : json_(json), bar_(!json && isatty(STDOUT_FILENO) != 0), steps_(steps), first_(first) {}

  void note(const std::string& text) const {
    if (!json_) print(text);
  }

  void step(const StepReport& report) const {
    if (json_) return print(report.to_json());
    if (!report.skipped.empty()) {
      print(fmt::format("step {}: no update: {}", report.step, report.skipped));
      return;
    }
    print(fmt::format(
        "step {:>{}}/{}  loss {:.4f}  norm {:.3f}  lr {:.2e}  {:.0f} tokens/s  forward {:.3f} "
        "backward {:.3f} update {:.3f} s  link {} up {} down  drives {} read {} written",
        report.step, std::to_string(steps_).size(), steps_, report.loss, report.gradient_norm,
        report.lr, report.tokens_per_s(), report.forward_s, report.backward_s, report.update_s,
        base::format_bytes(report.host_up_bytes), base::format_bytes(report.host_down_bytes),
        base::format_bytes(report.store_read_bytes),
        base::format_bytes(report.store_written_bytes)));
    draw_bar(report.step);
  }

  void validation(base::StepNumber at, double loss) const {
    if (json_) {
      print(nlohmann::ordered_json{{"step", at}, {"validation_loss", loss}}.dump());
    } else {
      print(fmt::format("step {}: validation loss {:.4f} nats per token", at, loss));
    }
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

void add_spans(const StepReport& report, std::vector<TraceSpan>& spans) {
  for (const train::Phase& phase : report.phases) {
    spans.push_back(
        {phase.name, "trainer", phase.begin_ns, phase.end_ns, fmt::format("step {}", report.step)});
  }
}

bool due(uint64_t every, base::StepNumber step) { return every != 0 && step % every == 0; }

Status validate(Trainer& trainer, const Screen& screen) {
  const Result<double> loss = trainer.validation_loss();
  if (loss.ok()) screen.validation(trainer.step(), *loss);
  // No data held out is a choice.
  return loss.status().code() == base::ErrorCode::kNotFound ? Status() : loss.status();
}

Status train_steps(Trainer& trainer, const Screen& screen, const Interrupt& interrupt,
                   std::vector<TraceSpan>& spans) {
  const train::TrainOptions& options = trainer.options().train;
  while (trainer.step() < options.steps) {
    SI_ASSIGN_OR_RETURN(const StepReport report, trainer.train_step(interrupt.token()));
    screen.step(report);
    if (!options.trace.empty()) add_spans(report, spans);
    const bool updated = report.skipped.empty();
    if (updated && due(options.validate_every, report.step) && report.step < options.steps) {
      SI_RETURN_IF_ERROR(validate(trainer, screen));
    }
  }
  return Status();
}

int run_train(const config::LoadedRecipe& loaded, bool json) {
  Interrupt interrupt;
  const train::Job job{loaded.recipe.options, loaded.recipe.updater, config::print_recipe(loaded)};
  Result<std::unique_ptr<Trainer>> opened = Trainer::open(job);
  if (!opened.ok()) {
    const bool wrong_value = opened.status().code() == base::ErrorCode::kInvalidArgument;
    return report(opened.status(), wrong_value ? kExitUsage : kExitFailed);
  }
  Trainer& trainer = **opened;
  const train::TrainOptions& options = trainer.options().train;
  // Told now, not after the last step.
  if (!options.trace.empty()) {
    Status written = write_trace(options.trace, {});
    if (!written.ok()) return report(std::move(written).with_context("train.trace"));
  }
  const Screen screen(json, options.steps, trainer.step());
  for (const std::string& line : trainer.describe()) screen.note(line);
  if (trainer.step() > 0) screen.note(fmt::format("going on after step {}", trainer.step()));

  std::vector<TraceSpan> spans;
  Status status = train_steps(trainer, screen, interrupt, spans);
  const bool interrupted = status.code() == base::ErrorCode::kCancelled;
  screen.clear_bar();
  if (status.ok() || interrupted) {
    const Status finished = trainer.finish();
    if (!finished.ok()) return report(finished);
  }
  if (!options.trace.empty()) {
    const Status written = write_trace(options.trace, spans);
    if (status.ok()) status = written;
  }
  if (interrupted) {
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
