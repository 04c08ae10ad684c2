// `smartinf inspect`: what is on a device.
#include <cstdio>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/storage/store.h"

#include "apps/smartinf/commands.h"

namespace smartinf::apps {
namespace {

struct InspectFlags {
  std::string device;
  bool json = false;
};

int run_inspect(const InspectFlags& flags) {
  const base::Result<storage::StoreState> state = storage::Store::peek(flags.device);
  if (!state.ok()) return report(state.status());
  if (flags.json) {
    const nlohmann::json all{{"path", flags.device},
                             {"run", state->run.to_string()},
                             {"initialized", state->initialized},
                             {"committed_step", state->committed_step},
                             {"prepared_step", state->prepared_step}};
    std::printf("%s\n", all.dump(2).c_str());
    return kExitDone;
  }
  std::printf("device          %s\n", flags.device.c_str());
  std::printf("run             %s\n", state->run.to_string().c_str());
  if (!state->initialized) {
    std::printf("state           creation was interrupted; the next run starts over\n");
    return kExitDone;
  }
  std::printf("committed step  %llu\n", static_cast<unsigned long long>(state->committed_step));
  return kExitDone;
}

}  // namespace

void add_inspect(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("inspect", "What is on a device");
  auto flags = std::make_shared<InspectFlags>();
  command->add_option("device", flags->device, "The device's directory or block device")
      ->required()
      ->type_name("DEVICE");
  command->add_flag("--json", flags->json, "Print one JSON object");
  command->footer(
      "Looks without locking or changing anything, also while a run is going.\n\n"
      "Examples:\n"
      "  smartinf inspect runs/quickstart/state\n"
      "  smartinf inspect /dev/nvme1n1 --json");
  command->callback([flags, &run] { run = [flags] { return run_inspect(*flags); }; });
}

}  // namespace smartinf::apps
