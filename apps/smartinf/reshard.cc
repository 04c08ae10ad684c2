// `smartinf reshard`: a state moves to other devices, or into another format.
#include <memory>

#include "apps/smartinf/commands.h"
#include "apps/smartinf/move_state.h"

namespace smartinf::apps {

void add_reshard(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("reshard", "Copy a state to other devices, or to another format");
  auto flags = std::make_shared<MoveFlags>();
  command->add_option("--from", flags->from, "All devices of the run, or its folder")
      ->required()
      ->type_name("DEVICE...");
  command->add_option("--to", flags->to, "Directories or block devices without a state")
      ->required()
      ->type_name("DEVICE...");
  command
      ->add_option("--stages", flags->stages,
                   "Stages of a pipeline, ranks.pipeline: each one's state goes to devices of its "
                   "own, the first ones of --to for the first stage; --from is the run's folder")
      ->type_name("N");
  command
      ->add_option("--split", flags->split,
                   "Layers of each of --stages, as ranks.split [those of equal computing]")
      ->type_name("9,8,...");
  add_move_flags(*command, *flags);
  command->footer(
      "The new devices may differ in number, size, subgroups and format. The old state stays as "
      "it\n"
      "is. The new state appears only when it is complete. In the same format every bit is the\n"
      "same, and training resumes with the same losses.\n\n"
      "Examples:\n"
      "  smartinf reshard --from /mnt/a --to /mnt/b /mnt/c\n"
      "  smartinf reshard --from runs/mine --to /mnt/b --state-format bf16\n"
      "  smartinf reshard --from /mnt/a --to /mnt/b --subgroup-elements 262144\n"
      "  smartinf reshard --from runs/mine --to /mnt/b /mnt/c --stages 2");
  command->callback([flags, &run] { run = [flags] { return move_state(*flags); }; });
}

}  // namespace smartinf::apps
