// The folder of a run: the recipe it was started with, one line of JSON per step, a lock.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"

namespace smartinf::train {

inline constexpr std::string_view kRecipeFile = "recipe.toml";
inline constexpr std::string_view kLogFile = "log.jsonl";
inline constexpr std::string_view kCheckpointsFolder = "checkpoints";

/// Threads: one caller.
class RunFolder {
 public:
  /// Makes the folder if missing and locks it until destruction.
  /// Errors: kBusy (another run works in it), kInvalidArgument (a file is in the way), kIo.
  static base::Result<RunFolder> open(const std::string& path);
  RunFolder(RunFolder&& other) noexcept;
  RunFolder& operator=(RunFolder&& other) noexcept;
  ~RunFolder();

  const std::string& path() const { return path_; }
  std::string file(std::string_view name) const;

  base::Status keep_recipe(std::string_view text) const;
  /// The last step that the log has; 0 for a new run.
  base::StepNumber logged_step() const;
  /// Cuts the log after its lines of `step` and before: what a lost step wrote is not history.
  base::Status keep_log_until(base::StepNumber step);
  /// Appends the validation loss of a step; once, though a complete run is run again.
  base::Status append_validation(base::StepNumber step, double loss);
  /// Appends a line; it reaches the operating system before the call returns.
  base::Status append_log(std::string_view json_line);

 private:
  RunFolder(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
  std::string path_;
  int lock_ = -1;
  int log_ = -1;
  std::optional<base::StepNumber> validated_;  // the last step whose validation the log has
};

/// Writes a file so that either all of it or nothing is there: beside it, then renamed over it.
base::Status write_file(const std::string& path, std::string_view text);

}  // namespace smartinf::train
