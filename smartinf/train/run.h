// A run: its folder, the state that is its own, and how far it has come.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/train/position.h"
#include "smartinf/train/ranks/ranks.h"
#include "smartinf/train/run_choice.h"
#include "smartinf/train/run_folder.h"
#include "smartinf/train/step_report.h"

namespace smartinf::train {

/// Threads: one caller.
struct Run {
  explicit Run(RunFolder of) : folder(std::move(of)) {}

  /// The last step of rank 0's log, on all ranks.
  base::Result<base::StepNumber> logged_step(const Ranks& ranks) const;
  /// The folder's files of a run that goes on from `step`: its recipe, the record of its state
  /// (has_state: there is one on devices), and its log, which has until now `logged` steps.
  base::Status keep_history(std::string_view recipe, const RunStart& start, bool has_state,
                            base::StepNumber logged);
  /// Logs a step that is not made: the next one sees other data. Errors: more than skips_max in a
  /// row; advice is theirs.
  base::Result<StepReport> pass_over(StepReport report, std::string why, const char* advice,
                                     uint32_t skips_max);
  /// A step is made.
  void advance() {
    ++step;
    skips_in_a_row = 0;
  }

  RunFolder folder;
  RunRecord record;           // of the state on devices
  base::StepNumber step = 0;  // updates done
  Position position;
  uint32_t skips_in_a_row = 0;
  std::vector<std::string> notices;  // on the log, and on what was planned and is not done
};

}  // namespace smartinf::train
