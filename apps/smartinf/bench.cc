// smartinf bench: measurements of this machine, each beside the limit it is held to.
#include "apps/smartinf/commands.h"

namespace smartinf::apps {

void add_bench(CLI::App& app, Run& run) {
  CLI::App* bench =
      app.add_subcommand("bench", "Measure kernels and steps beside the machine's own limit");
  bench->require_subcommand(1);
  bench->footer(
      "Examples:\n"
      "  smartinf bench step --params 2e8 --device /mnt/nvme0/bench\n"
      "  smartinf bench overlap --params 2e8 --device /mnt/nvme0/bench\n"
      "  smartinf bench kernels --rule adamw\n"
      "  smartinf bench attend --tokens 8192 --sequences 16\n"
      "  smartinf bench rows --rows 1e6 --device /mnt/nvme0/bench\n"
      "  smartinf bench BENCHMARK --help");
  add_bench_step(*bench, run);
  add_bench_overlap(*bench, run);
  add_bench_kernels(*bench, run);
  add_bench_attend(*bench, run);
  add_bench_rows(*bench, run);
}

}  // namespace smartinf::apps
