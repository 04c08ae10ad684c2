// smartinf export: a run's weights as a folder for Hugging Face's transformers.
#include "smartinf/train/export.h"

#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/train/options.h"
#include "smartinf/train/run_folder.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/progress.h"
#include "apps/smartinf/state_places.h"

namespace smartinf::apps {
namespace {

using base::Result;
using base::Status;

struct ExportFlags {
  std::string run;
  std::string out;
  std::string checkpoint;
  std::string type;
  std::string shard_size = "5GB";
  bool merge = false;
  bool json = false;
};

int run_export(const ExportFlags& flags) {
  // The run keeps the values it trained with, those of its flags too.
  Result<config::LoadedRecipe> loaded = load_run(flags.run);
  if (!loaded.ok()) {
    return report(std::move(loaded).status().with_context(flags.run + " is not a run's folder"));
  }
  if (!flags.checkpoint.empty()) {
    const Status used = use_checkpoint(flags.checkpoint, loaded->recipe);
    if (!used.ok()) return report(used);
  }
  train::ExportOptions options;
  options.out = flags.out;
  options.merge = flags.merge;
  if (!flags.type.empty()) {
    options.type = *base::enum_from_name<base::DataType>(flags.type);
  }
  const Result<uint64_t> shard_bytes = base::parse_bytes(flags.shard_size);
  if (!shard_bytes.ok()) return report(shard_bytes.status(), kExitUsage);
  if (*shard_bytes < base::kKiB) {
    return report(Status(base::ErrorCode::kInvalidArgument,
                         fmt::format("--shard-size is {}", base::format_bytes(*shard_bytes)),
                         "Choose a size from 1 KiB."),
                  kExitUsage);
  }
  options.shard_bytes_max = *shard_bytes;
  const Interrupt interrupt("stopping; press Ctrl-C again to stop at once");
  Progress progress("exporting", interrupt.token());
  options.progress = [&](uint64_t done, uint64_t total) { return progress(done, total); };
  const Result<train::ExportSummary> summary = train::export_run(
      {loaded->recipe.options, loaded->recipe.updater, /*recipe=*/"", {}, {}, {}}, options);
  progress.clear();
  if (!summary.ok()) return report(summary.status());
  if (flags.json) {
    const nlohmann::ordered_json line = {{"out", flags.out},
                                         {"step", summary->step},
                                         {"parameters", summary->parameters},
                                         {"files", summary->files}};
    fmt::print("{}\n", line.dump());
  } else {
    fmt::print("{}: {} parameters of step {}, in {}\n", flags.out, summary->parameters,
               summary->step, fmt::join(summary->files, ", "));
  }
  return kExitDone;
}

}  // namespace

void add_export(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("export", "Write a run's weights as a folder that transformers loads");
  auto flags = std::make_shared<ExportFlags>();
  command->add_option("run", flags->run, "Folder of the run, e.g. runs/quickstart")
      ->required()
      ->type_name("RUN");
  command->add_option("--out", flags->out, "Folder to create")->required()->type_name("DIR");
  command
      ->add_option(
          "--checkpoint", flags->checkpoint,
          "Checkpoint to read in place of the run's devices, or a folder of checkpoints, of "
          "which the newest is taken")
      ->type_name("DIR");
  command
      ->add_option("--type", flags->type,
                   "Type of the weights [of model.from, else train.precision of the run]")
      ->check(CLI::IsMember(base::enum_name_list<base::DataType>()))
      ->type_name("f32|bf16|f16");
  command->add_flag(
      "--merge", flags->merge,
      "Add adapters to the model's weights, instead of writing the adapters alone, for PEFT");
  command->add_option("--shard-size", flags->shard_size, "Largest size of one file [5GB]")
      ->type_name("SIZE");
  command->add_flag("--json", flags->json, "Print one JSON object");
  command->footer(
      "Examples:\n"
      "  smartinf export runs/quickstart --out my-model\n"
      "  smartinf export runs/mine --checkpoint runs/mine/checkpoints/best --out best\n"
      "  python3 -c \"from transformers import AutoModelForCausalLM as M; "
      "M.from_pretrained('my-model')\"");
  command->callback([flags, &run] { run = [flags] { return run_export(*flags); }; });
}

}  // namespace smartinf::apps
