// smartinf distill: a smaller model learns layer by layer from a larger one; run again, it resumes.
#include <cmath>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/engine/memory.h"
#include "smartinf/train/distill/distiller.h"

#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/recipe_flags.h"
#include "apps/smartinf/train_ranks.h"

namespace smartinf::apps {
namespace {

using base::Result;
using base::Status;

struct DistillFlags {
  RecipeFlags recipe;
  bool json = false;
};

void say(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

/// A line for the first step of a layer, or of the student as a whole, the last, and one in so many
/// between.
void show_step(const train::StepReport& report, uint32_t block, uint32_t blocks,
               const train::TrainOptions& options, uint64_t whole_steps, bool json) {
  const uint64_t steps = block == blocks ? whole_steps : options.steps;
  const bool due = report.step % options.log_every == 0;
  if (!due && report.step != 1 && report.step != steps) return;
  if (json) {
    auto line = nlohmann::ordered_json::parse(report.to_json());
    line["block"] = block;
    return say(line.dump());
  }
  const std::string part = block == blocks ? "whole student"
                                           : fmt::format("layer {:>{}}/{}", block + 1,
                                                         std::to_string(blocks).size(), blocks);
  say(fmt::format(
      "{}  step {:>{}}/{}  loss {:.3e}  grad norm {:.2e}  lr {:.2e}  {} "
      "(forward {} backward {} update {})",
      part, report.step, std::to_string(steps).size(), steps, report.loss, report.gradient_norm,
      report.lr, base::format_seconds(report.seconds), base::format_seconds(report.forward_s),
      base::format_seconds(report.backward_s), base::format_seconds(report.update_s)));
}

void show_summary(const train::DistillSummary& made, bool json) {
  const train::DistillLosses& losses = made.losses;
  if (json) {
    nlohmann::ordered_json line{{"student", made.folder},
                                {"micro_batches", made.micro_batches},
                                {"teacher_layers", made.teacher_layers},
                                {"teacher_loss", losses.teacher},
                                {"untrained_loss", losses.untrained},
                                {"distilled_loss", losses.distilled}};
    if (losses.whole > 0) line["whole_loss"] = losses.whole;
    return say(line.dump());
  }
  if (made.micro_batches > 0) {
    say(fmt::format(
        "teacher: {} layers computed for {} micro batches, {:.3g} each", made.teacher_layers,
        made.micro_batches,
        static_cast<double>(made.teacher_layers) / static_cast<double>(made.micro_batches)));
  }
  if (losses.teacher > 0) {
    const auto perplexity = [](double loss) { return std::exp(loss); };
    const double gap = perplexity(losses.untrained) - perplexity(losses.teacher);
    const auto shown = [&](double loss) {
      const double closed = perplexity(losses.untrained) - perplexity(loss);
      return fmt::format(
          "{:.4g}{}", perplexity(loss),
          gap > 0 ? fmt::format(" ({:.1f} % of the gap closed)", 100 * closed / gap) : "");
    };
    say(fmt::format(
        "perplexity on data held out: teacher {:.4g}, student before {:.4g}, "
        "distilled {}{}",
        perplexity(losses.teacher), perplexity(losses.untrained), shown(losses.distilled),
        losses.whole > 0 ? ", then as a whole " + shown(losses.whole) : ""));
  }
  if (const uint64_t bytes = engine::peak_memory_bytes(); bytes > 0) {
    say(fmt::format("memory: at most {} of this process were in the host's memory",
                    base::format_bytes(bytes)));
  }
  if (!made.packed.empty()) {
    say(
        fmt::format("{} is the student in 4 bits, which loaders of compressed-tensors' "
                    "pack-quantized read",
                    made.packed));
  }
  say(fmt::format("done: {} is the student, which transformers loads", made.folder));
}

int run_distill(config::LoadedRecipe& loaded, const DistillFlags& flags) {
  Interrupt interrupt;
  const Status options = train::validate(loaded.recipe.distill);
  if (!options.ok()) return report(options, kExitUsage);
  loaded.recipe.options.model.from = loaded.recipe.distill.teacher;
  const Result<train::Ranks> met = meet_ranks(loaded, interrupt);
  if (!met.ok()) return fail({}, met.status());
  const train::Ranks& ranks = *met;
  const bool says = ranks.first() && !flags.json;
  std::string precision;
  const Status settled = settle_precision(loaded, ranks, /*start_over=*/false, precision);
  if (!settled.ok()) return fail(ranks, settled);
  if (!precision.empty() && says) say(precision);
  config::LoadedRecipe kept = loaded;
  kept.recipe.options.model.from.clear();
  config::make_inputs_absolute(kept.recipe);
  const Status made = make_data(loaded, ranks, /*start_over=*/false, flags.json, interrupt);
  if (!made.ok()) return fail(ranks, made);
  train::DistillJob job{loaded.recipe.options,
                        loaded.recipe.distill,
                        loaded.recipe.updater,
                        config::print_recipe(kept),
                        ranks,
                        interrupt.token(),
                        {},
                        {}};
  job.note = [&](const std::string& line) {
    if (says) say(line);
  };
  job.show = [&](const train::StepReport& report, uint32_t block, uint32_t blocks) {
    show_step(report, block, blocks, job.options.train, job.distill.whole_steps, flags.json);
  };
  const Result<train::DistillSummary> done = train::distill(job);
  if (done.ok()) {
    if (ranks.first()) show_summary(*done, flags.json);
    return kExitDone;
  }
  if (done.status().code() != base::ErrorCode::kCancelled) {
    return fail(ranks, done.status(), /*started=*/true);
  }
  if (says) say("stopped at a committed step; run the command again to resume");
  return kExitInterrupted;
}

}  // namespace

void add_distill(CLI::App& app, const Overrides& overrides, Run& run) {
  CLI::App* command = app.add_subcommand("distill", kDistillSummary);
  auto flags = std::make_shared<DistillFlags>();
  add_recipe_flags(*command, flags->recipe);
  command->add_flag("--json", flags->json, "Print one JSON object for each line of text");
  command->footer(
      "Examples:\n"
      "  smartinf distill recipes/distill.toml --teacher.from DIR --student.prune "
      "ffn=0.5,heads=0.75\n"
      "  smartinf distill recipes/distill.toml --teacher.from DIR --student.from SMALLER\n"
      "  smartinf distill recipes/distill.toml --teacher.from DIR --student.quantise int4 "
      "--optimizer.beta1 0.5\n\n"
      "Ctrl-C stops at a committed step, with exit code 130; run again, it resumes.");
  command->callback([flags, &overrides, &run] {
    run = [flags, &overrides] {
      config::LoadedRecipe loaded;
      if (const auto code = read_recipe(flags->recipe, overrides, loaded)) return *code;
      return run_distill(loaded, *flags);
    };
  });
}

}  // namespace smartinf::apps
