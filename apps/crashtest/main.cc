// smartinf-crashtest: cuts the power of simulated devices at random points of a run and looks what
// recovery finds. Exit code 0 when nothing was lost, 1 otherwise.
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/crashtest/crash_scenario.h"
#include "apps/smartinf/format_flags.h"

int main(int argc, char** argv) {
  using smartinf::crash::CommitFlaw;
  smartinf::crash::ScenarioOptions options;
  uint64_t points = 1000;
  CLI::App app(
      "Cuts the power of simulated devices at random points of a run, some of them again during "
      "recovery, and checks that recovery finds exactly a committed step. Of the steps some are "
      "aborted and made again, some of the state stays in memory, rows of a table are written to a "
      "log and merged, and some steps are updated in "
      "part by a guess, as with optimizer.overlap = \"early\": it is right, or wrong and written "
      "over, or aborted. The last lines say how many cuts fell into what.\n"
      "Example: smartinf-crashtest --seed 7 --points 1000",
      "smartinf-crashtest");
  app.add_option("--seed", options.seed, "Makes the same run with the same cuts")
      ->capture_default_str();
  app.add_option("--points", points, "Power cuts")->capture_default_str();
  app.add_option("--devices", options.devices, "Simulated devices")
      ->capture_default_str()
      ->check(CLI::Range(1, 16));
  app.add_option("--steps", options.steps, "Steps of the run")->capture_default_str();
  smartinf::apps::FormatFlags format;
  smartinf::apps::add_format_flags(app, format, "f32");
  app.add_option("--elements", options.elements, "Elements of the larger subgroup of a device")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 24));
  app.add_option("--rows", options.rows, "Rows of a device's table; 0: no table")
      ->capture_default_str()
      ->check(CLI::Range(0, 1000));
  const std::map<std::string, CommitFlaw> flaws{{"none", CommitFlaw::kNone},
                                                {"no-sync", CommitFlaw::kNoSync},
                                                {"superblock-first", CommitFlaw::kSuperblockFirst},
                                                {"rows-no-sync", CommitFlaw::kRowsNoSync}};
  app.add_option("--flaw", options.flaw,
                 "A commit that is wrong on purpose (no-sync, superblock-first, rows-no-sync): "
                 "must lose steps")
      ->transform(CLI::CheckedTransformer(flaws));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  options.format = format.format();

  std::mt19937_64 random(options.seed);
  uint64_t lost = 0;
  uint64_t shown = 0;
  std::map<std::string, uint64_t> cuts;  // by what the run was doing
  for (uint64_t point = 0; point < points; ++point) {
    smartinf::crash::ScenarioOptions one = options;
    one.seed = random();
    // The length of a run depends on its order of completions a little: measured for each.
    smartinf::crash::Scenario whole(one);
    whole.run();
    smartinf::crash::Scenario cut(one);
    const uint64_t at = random() % (whole.events() + 1);
    cut.run(at);
    ++cuts[std::string(cut.moment())];
    const auto fate =
        static_cast<smartinf::storage::CutFate>(random() % smartinf::storage::kCutFates);
    cut.settle(fate, random());
    if (random() % 2 == 0) {
      cut.recover_and_cut(random() % 64);
      cut.settle(static_cast<smartinf::storage::CutFate>(random() % smartinf::storage::kCutFates),
                 random());
    }
    const std::string wrong = cut.recover_and_judge();
    if (wrong.empty()) continue;
    ++lost;
    if (shown++ < 5) {
      std::printf("point %llu (event %llu of %llu, %s): %s\n",
                  static_cast<unsigned long long>(point), static_cast<unsigned long long>(at),
                  static_cast<unsigned long long>(whole.events()),
                  std::string(cut.moment()).c_str(), wrong.c_str());
    }
  }
  std::printf("lost %llu of %llu; the cuts fell into\n", static_cast<unsigned long long>(lost),
              static_cast<unsigned long long>(points));
  for (const auto& [moment, count] : cuts) {
    std::printf("%8llu  %s\n", static_cast<unsigned long long>(count), moment.c_str());
  }
  return lost == 0 ? 0 : 1;
}
