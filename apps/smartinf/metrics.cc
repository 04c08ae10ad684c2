// smartinf metrics: what a run's log has measured, as CSV and for TensorBoard.
#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <sys/stat.h>

#include "smartinf/base/file.h"
#include "smartinf/train/run_folder.h"
#include "smartinf/train/run_log.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/python_script.h"

namespace smartinf::apps {
namespace {

using base::Result;
using base::Status;
using train::LogRow;

constexpr std::chrono::milliseconds kLook(500);  // between looks at a log that is followed

struct MetricsFlags {
  std::string run;
  std::string csv;
  std::string tensorboard;
  bool follow = false;
};

/// Tells whether a log has changed: appended to, or cut by a run that went on.
std::array<int64_t, 4> look_of(const std::string& path) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) return {};
  return {static_cast<int64_t>(found.st_ino), found.st_size, found.st_mtim.tv_sec,
          found.st_mtim.tv_nsec};
}

/// An event file that grows with the log. Where the log was cut it begins again.
class EventFile {
 public:
  explicit EventFile(std::string folder) : folder_(std::move(folder)) {}

  /// Errors: of PythonScript::start().
  Status add(std::span<const LogRow> rows) {
    std::vector<std::string> lines;
    for (const LogRow& row : rows) lines.push_back(row.to_json());
    const bool goes_on = script_.has_value() && lines.size() >= written_.size() &&
                         std::equal(written_.begin(), written_.end(), lines.begin());
    if (!goes_on) {
      if (script_.has_value()) script_->finish();
      SI_ASSIGN_OR_RETURN(script_, PythonScript::start(write_tensorboard_script(), {folder_}));
      written_.clear();
    }
    std::string text;
    for (size_t i = written_.size(); i < lines.size(); ++i) text += lines[i] + "\n";
    written_ = std::move(lines);
    script_->write(text + "\n");  // an empty line: what came before it is to be in the file
    return Status();
  }
  /// False after a failure, of which the script has said why.
  bool works() const { return !script_.has_value() || script_->runs(); }
  bool finish() { return !script_.has_value() || script_->finish(); }

 private:
  std::string folder_;
  std::optional<PythonScript> script_;
  std::vector<std::string> written_;
};

int write_metrics(const MetricsFlags& flags, std::optional<EventFile>& events) {
  const Result<std::vector<LogRow>> rows = train::read_log(flags.run);
  if (!rows.ok()) return report(rows.status());
  if (flags.csv.empty() && flags.tensorboard.empty()) fmt::print("{}", train::log_to_csv(*rows));
  if (!flags.csv.empty()) {
    const Status written =
        base::write_text_file(flags.csv, train::log_to_csv(*rows), "cannot write the metrics");
    if (!written.ok()) return report(written);
  }
  if (!events.has_value()) return kExitDone;
  const Status added = events->add(*rows);
  return added.ok() ? kExitDone : report(added);
}

int run_metrics(const MetricsFlags& flags) {
  std::optional<EventFile> events;
  if (!flags.tensorboard.empty()) events.emplace(flags.tensorboard);
  if (!flags.follow) {
    const int code = write_metrics(flags, events);
    const bool finished = !events.has_value() || events->finish();
    return code == kExitDone && !finished ? kExitFailed : code;
  }
  if (flags.csv.empty() && flags.tensorboard.empty()) {
    return report(Status(base::ErrorCode::kInvalidArgument, "--follow keeps a file up to date",
                         "Add --csv FILE or --tensorboard DIR."),
                  kExitUsage);
  }
  const Interrupt interrupt("stopping");
  const std::string log = flags.run + "/" + std::string(train::kLogFile);
  std::array<int64_t, 4> seen{};
  bool first = true;
  while (!interrupt.requested() && (!events.has_value() || events->works())) {
    const std::array<int64_t, 4> now = look_of(log);
    const auto began = std::chrono::steady_clock::now();
    if (first || now != seen) {
      const int code = write_metrics(flags, events);
      if (code != kExitDone) return code;
    }
    first = false;
    seen = now;
    // Sleeps for most of the time where the log is long, so that the machine is left to others.
    std::this_thread::sleep_for(std::max<std::chrono::steady_clock::duration>(
        kLook, 10 * (std::chrono::steady_clock::now() - began)));
  }
  if (events.has_value() && !events->finish()) return kExitFailed;
  return kExitInterrupted;
}

}  // namespace

void add_metrics(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "metrics", "Write a run's losses, norms and times as CSV or for TensorBoard");
  auto flags = std::make_shared<MetricsFlags>();
  command->add_option("run", flags->run, "Folder of the run, e.g. runs/quickstart")
      ->required()
      ->type_name("RUN");
  command->add_option("--csv", flags->csv, "File to write; by default rows are printed")
      ->type_name("FILE");
  command
      ->add_option("--tensorboard", flags->tensorboard,
                   "Folder to write an event file into (needs python3 with tensorboard)")
      ->type_name("DIR");
  command->add_flag(
      "--follow", flags->follow,
      "Keep the files up to date while the run goes on, until Ctrl-C (exit code 130)");
  command->footer(
      "Each step has one row, with its validations and norms of layers (docs/metrics.md).\n"
      "SMARTINF_PYTHON names another Python than python3.\n\n"
      "Examples:\n"
      "  smartinf metrics runs/quickstart --csv quickstart.csv\n"
      "  smartinf metrics runs/quickstart --tensorboard events/quickstart --follow");
  command->callback([flags, &run] { run = [flags] { return run_metrics(*flags); }; });
}

}  // namespace smartinf::apps
