// The folder of a run: the recipe it was started with, which run on which devices it belongs to,
// one line of JSON per step, a lock.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"

namespace smartinf::train {

inline constexpr std::string_view kRecipeFile = "recipe.toml";
inline constexpr std::string_view kRunFile = "run.json";
inline constexpr std::string_view kLogFile = "log.jsonl";
inline constexpr std::string_view kCheckpointsFolder = "checkpoints";

/// Which state is this folder's. Devices know the folder in turn (Position::folder), and the two
/// must agree. In the file, paths inside the folder are relative to it: a copy of the folder is of
/// the copied devices.
struct RunRecord {
  std::string run;                   // storage::RunId as text
  std::vector<std::string> devices;  // paths; those outside the folder are absolute
  friend bool operator==(const RunRecord&, const RunRecord&) = default;
};
/// Nothing for a folder that has none: it is no run's, or an earlier version's. Errors: kCorrupt.
base::Result<std::optional<RunRecord>> read_run_record(const std::string& folder);

/// Visits the lines of a log that say their step, in order. One that a kill cut short is none.
void for_each_line(
    const std::string& path,
    const std::function<void(base::StepNumber, const nlohmann::json&, const std::string&)>& visit);

/// The last step that a run's log has; 0 without a log.
base::StepNumber logged_step(const std::string& folder);

/// Threads: one caller.
class RunFolder {
 public:
  /// Makes the folder if missing and locks it until destruction.
  /// Errors: kBusy (another run works in it), kInvalidArgument (a file is in the way), kIo.
  static base::Result<RunFolder> open(const std::string& path);
  /// For who may not write there: nothing is looked at, and what would change it does nothing.
  static RunFolder left_alone(std::string path) { return RunFolder(std::move(path), -1); }
  RunFolder(RunFolder&& other) noexcept;
  RunFolder& operator=(RunFolder&& other) noexcept;
  ~RunFolder();

  const std::string& path() const { return path_; }
  std::string file(std::string_view name) const;

  base::Status keep_recipe(std::string_view text) const;
  /// Durable when it returns: devices are given their first state after it.
  base::Status keep_run_record(const RunRecord& record) const;
  /// Removes the record of a run that could not begin.
  void remove_run_record() const;

  /// Lines that keep_log_until() took out of the log.
  struct LogCut {
    base::StepNumber last = 0;  // of the log before
    std::string kept_in;        // the file that has the lines now; empty: they were of step + 1
  };
  /// Opens the log after its lines of `step` and before. A line of the step after it is what a
  /// crash lost, and dropped; more than that goes to a file of its own.
  base::Result<LogCut> keep_log_until(base::StepNumber step);
  /// Gives the log another name, if there is one, and says which: log.jsonl.1, log.jsonl.2, ...
  base::Result<std::string> set_log_aside() const;
  /// Appends a step's line of validation; once, though a complete run is run again.
  void append_validation(base::StepNumber step, std::string_view json_line);
  /// Appends a line; it reaches the operating system before the call returns, unless it cannot be
  /// written: then a warning says so once, and it is tried again with the lines that follow, for a
  /// log is not worth the run.
  void append_log(std::string_view json_line);
  /// Tries to write what is left, and warns of what is lost with it.
  void close_log();

 private:
  RunFolder(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
  base::Status write_pending();

  std::string path_;
  int lock_ = -1;
  int log_ = -1;
  std::string pending_;  // of the log, not written yet; at most kPendingBytesMax
  bool pending_lost_ = false;
  std::optional<base::StepNumber> validated_;  // the last step whose validation the log has
};

}  // namespace smartinf::train
