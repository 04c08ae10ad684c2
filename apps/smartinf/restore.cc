// `smartinf restore`: a checkpoint becomes a state to train with.
#include <memory>

#include "smartinf/engine/checkpoint.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/move_state.h"

namespace smartinf::apps {
namespace {

int run_restore(const MoveFlags& flags) {
  const base::Result<engine::Checkpoint> checkpoint = engine::read_checkpoint(flags.from.front());
  if (!checkpoint.ok()) return report(checkpoint.status());
  return move_state(flags);
}

}  // namespace

void add_restore(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("restore", "Make devices from a checkpoint");
  auto flags = std::make_shared<MoveFlags>();
  command->add_option("checkpoint", flags->from, "Folder of the checkpoint")
      ->required()
      ->expected(1)
      ->type_name("CHECKPOINT");
  command
      ->add_option("--device", flags->to,
                   "Device for the state; may be repeated, for more or fewer devices than the "
                   "checkpoint has")
      ->required()
      ->type_name("DEVICE");
  command->add_flag("--replace", flags->replace,
                    "Replace the states that the devices hold when the new one is complete; there "
                    "must be room for both");
  add_move_flags(*command, *flags);
  command->footer(
      "The checkpoint stays as it is. The restored state has a run id of its own, so its devices "
      "are\n"
      "never mixed with the old ones. Training resumes from its step with the same losses.\n\n"
      "Examples:\n"
      "  smartinf restore runs/mine/checkpoints/step-00000100 --device /mnt/a --device /mnt/b\n"
      "  smartinf restore runs/mine/checkpoints/step-00000100 --device runs/mine/state --replace");
  command->callback([flags, &run] { run = [flags] { return run_restore(*flags); }; });
}

}  // namespace smartinf::apps
