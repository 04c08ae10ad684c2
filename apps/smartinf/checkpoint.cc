// `smartinf checkpoint`: keeps a copy of a run's committed state.
#include "smartinf/engine/checkpoint.h"

#include <cstdio>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/train/run_folder.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/progress.h"
#include "apps/smartinf/remote_flags.h"
#include "apps/smartinf/state_places.h"

namespace smartinf::apps {
namespace {

using base::Result;

struct CheckpointFlags {
  std::vector<std::string> places;
  std::string out;
  uint64_t keep = 0;
  std::string memory_budget = "256MiB";
  bool json = false;
  serve::RemoteOptions remote;
};

int run_checkpoint(CheckpointFlags& flags) {
  const Result<uint64_t> memory_bytes = memory_budget(flags.memory_budget);
  if (!memory_bytes.ok()) return report(memory_bytes.status(), kExitUsage);
  engine::CheckpointOptions options;
  options.folder = flags.out;
  options.keep = flags.keep;
  options.memory_budget_bytes = *memory_bytes;
  if (options.folder.empty()) {
    if (flags.places.size() != 1 || !is_run_folder(flags.places.front())) {
      return report(
          base::Status(base::ErrorCode::kInvalidArgument,
                       "devices were named without a folder for the checkpoint",
                       "Name the folder (--out DIR), or name the run's folder, which has one."),
          kExitUsage);
    }
    options.folder = flags.places.front() + "/" + std::string(train::kCheckpointsFolder);
  }
  const Result<std::vector<std::string>> devices = devices_of(flags.places, &flags.remote);
  if (!devices.ok()) return report(devices.status());
  const Interrupt interrupt("stopping; press Ctrl-C again to stop at once");
  Progress progress("copying the state", interrupt.token());
  options.progress = [&](uint64_t done, uint64_t total) { return progress(done, total); };

  const uint64_t begin_ns = base::now_ns();
  Result<engine::StoredRun> run =
      engine::open_stored_run(engine::sources_at(*devices, storage::RingKind::kAuto, flags.remote),
                              storage::ReaderLock::kTake);
  if (!run.ok()) {
    const bool busy = run.status().code() == base::ErrorCode::kBusy;
    return report(
        busy ? base::Status(
                   base::ErrorCode::kBusy, run.status().what(),
                   "Wait for the run to end, or stop it with Ctrl-C and start it again afterwards.",
                   run.status().place())
             : run.status());
  }
  const Result<engine::CheckpointSummary> made = engine::write_checkpoint(*run, options);
  progress.clear();
  if (!made.ok()) return report(made.status());
  if (flags.json) {
    const nlohmann::ordered_json json{{"checkpoint", made->path},
                                      {"step", made->step},
                                      {"state_bytes", made->state_bytes},
                                      {"cloned", made->cloned},
                                      {"existed", made->existed},
                                      {"blocks_without_checksum", made->blocks_without_checksum},
                                      {"seconds", base::seconds_since(begin_ns)},
                                      {"removed", made->removed}};
    std::printf("%s\n", json.dump(2).c_str());
    return kExitDone;
  }
  for (const std::string& removed : made->removed) {
    std::printf("deleted %s\n", removed.c_str());
  }
  std::printf("%s: step %llu, %s, %s\n", made->path.c_str(),
              static_cast<unsigned long long>(made->step),
              base::format_bytes(made->state_bytes).c_str(),
              made->existed  ? "was there already"
              : made->cloned ? "shares its blocks with the devices"
                             : "copied, every block checked");
  std::printf("smartinf restore %s --device DIR brings it back\n", made->path.c_str());
  return kExitDone;
}

}  // namespace

void add_checkpoint(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("checkpoint", "Copy a run's committed state to a folder");
  auto flags = std::make_shared<CheckpointFlags>();
  command->add_option("run", flags->places, "Folder of the run, or all devices of a run")
      ->required()
      ->type_name("RUN|DEVICE...");
  command->add_option("--out", flags->out, "Folder for checkpoints [RUN/checkpoints]")
      ->type_name("DIR");
  command
      ->add_option("--keep", flags->keep,
                   "Number of newest checkpoints of this run that are kept [0: all]")
      ->check([](const std::string& text) {
        return text.starts_with("-") ? "give a whole number from 0" : std::string();
      })
      ->type_name("N");
  command->add_option("--memory-budget", flags->memory_budget, "Memory for the copy [256MiB]")
      ->type_name("SIZE");
  command->add_flag("--json", flags->json, "Print one JSON object");
  add_remote_flags(*command, flags->remote);
  command->footer(
      "The copy of step 100 is DIR/step-00000100. On btrfs and xfs it shares the devices' blocks\n"
      "and takes no time; elsewhere the state is copied and checked. Stop the run with Ctrl-C\n"
      "first, and start it again afterwards.\n\n"
      "Examples:\n"
      "  smartinf checkpoint runs/quickstart --keep 3\n"
      "  smartinf checkpoint /mnt/a /mnt/b --out /backup/mine");
  command->callback([flags, &run] { run = [flags] { return run_checkpoint(*flags); }; });
}

}  // namespace smartinf::apps
