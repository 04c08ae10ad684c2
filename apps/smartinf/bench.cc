// smartinf bench: measurements of this machine, each beside the limit it is held to.
#include "apps/smartinf/commands.h"

namespace smartinf::apps {

void add_bench(CLI::App& app, Run& run) {
  CLI::App* bench =
      app.add_subcommand("bench", "Measures kernels and steps beside the machine's own limit");
  bench->require_subcommand(1);
  add_bench_step(*bench, run);
  add_bench_traffic(*bench, run);
  add_bench_scale(*bench, run);
  add_bench_kernels(*bench, run);
}

}  // namespace smartinf::apps
