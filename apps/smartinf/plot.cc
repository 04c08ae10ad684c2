// smartinf plot: a picture of one or several runs.
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/train/run_log.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/python_script.h"

namespace smartinf::apps {
namespace {

using base::Result;
using base::Status;

struct PlotFlags {
  std::vector<std::string> runs;
  std::string out;
};

int run_plot(const PlotFlags& flags) {
  if (flags.out.empty() && flags.runs.size() > 1) {
    return report(Status(base::ErrorCode::kInvalidArgument,
                         "several runs are in one picture, and it is not said which file",
                         "Add --out FILE.png."),
                  kExitUsage);
  }
  std::string text;
  for (const std::string& folder : flags.runs) {
    const Result<std::vector<train::LogRow>> rows = train::read_log(folder);
    if (!rows.ok()) return report(rows.status());
    using Json = nlohmann::json;
    text += Json{{"run", folder}}.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    for (const train::LogRow& row : *rows) text += row.to_json() + "\n";
  }
  const std::string out = flags.out.empty() ? flags.runs.front() + "/plot.png" : flags.out;
  Result<PythonScript> script = PythonScript::start(plot_run_script(), {out});
  if (!script.ok()) return report(script.status());
  script->write(text);
  return script->finish() ? kExitDone : kExitFailed;
}

}  // namespace

void add_plot(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("plot", "Draw loss, norm, learning rate and speed of runs");
  auto flags = std::make_shared<PlotFlags>();
  command->add_option("run", flags->runs, "Folders of runs, drawn over each other")
      ->required()
      ->type_name("RUN");
  command
      ->add_option("--out", flags->out,
                   "Picture to write, .png, .svg or .pdf [of one run: RUN/plot.png]")
      ->type_name("FILE");
  command->footer(
      "The command needs python3 with matplotlib; SMARTINF_PYTHON names another Python.\n\n"
      "Examples:\n"
      "  smartinf plot runs/quickstart\n"
      "  smartinf plot runs/bf16 runs/q8 --out compared.png");
  command->callback([flags, &run] { run = [flags] { return run_plot(*flags); }; });
}

}  // namespace smartinf::apps
