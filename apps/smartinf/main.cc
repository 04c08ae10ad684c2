// The smartinf command: parses the command line, installs the log sink, runs one subcommand.
#include <cstdio>

#include "apps/smartinf/commands.h"

int main(int argc, char** argv) {
  CLI::App app("Trains language models whose optimizer state lives on storage and is updated there.",
               "smartinf");
  app.set_version_flag("--version", SMARTINF_VERSION);
  smartinf::apps::Run run;
  smartinf::apps::add_bench_command(app, run);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? smartinf::apps::kExitDone : smartinf::apps::kExitUsage;
  }
  if (!run) {
    std::fputs(app.help().c_str(), stdout);
    return smartinf::apps::kExitUsage;
  }
  return run();
}
