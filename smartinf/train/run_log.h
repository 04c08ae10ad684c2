// Measurements of a run's log, as rows for other programs.
#pragma once

#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"

namespace smartinf::train {

/// Facts about a step in one line of the log.
struct LogRow {
  base::StepNumber step = 0;
  bool begins_step = false;  // the step's own line; validations and norms of layers follow it
  /// An object of numbers, texts and booleans by name; null for a number that was not finite. What
  /// lies in objects of the line is named "evaluation_loss/NAME", "layers/NAME/gradient_norm".
  nlohmann::json values;

  /// {"step": .., NAME: .., ..} without a newline.
  std::string to_json() const;
};

/// The lines of log.jsonl about steps, validations and layers, in their order; checkpoints and
/// bytes by device are left out. Errors: kNotFound where the folder has no log.
base::Result<std::vector<LogRow>> read_log(const std::string& folder);

/// One line for each step, under a line of names; what follows a step's own line is in its line,
/// and so there may be two lines of a step that was skipped at first. A cell is empty where a line
/// of the log says nothing. Numbers have all their digits.
std::string log_to_csv(std::span<const LogRow> rows);

}  // namespace smartinf::train
