// How a training run is doing, in a few lines at the end of a terminal that are drawn again after
// each step. What is printed meanwhile stays above them.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/clock.h"
#include "smartinf/train/step_report.h"

namespace smartinf::apps {

/// Writes to standard output. Threads: one caller.
class LiveView {
 public:
  /// Whether standard output is a terminal that can be drawn on.
  static bool possible();

  /// A view of a run to `steps` that goes on after step `first`.
  LiveView(uint64_t steps, base::StepNumber first) : steps_(steps), first_(first) {}

  /// A step with an update. Draws, at most ten times a second.
  void add(const train::StepReport& report);
  void add_validation(double loss) { validation_ = loss; }
  /// Prints a line above.
  void print(const std::string& line);
  /// Makes room for others, until the next step.
  void clear();

 private:
  std::vector<std::string> lines(bool unicode) const;
  void draw();

  uint64_t steps_;
  base::StepNumber first_;
  uint64_t start_ns_ = base::now_ns();
  uint64_t drawn_ns_ = 0;
  bool shown_ = false;
  train::StepReport last_;
  std::deque<train::StepReport> recent_;  // without phases and bytes
  std::optional<double> validation_;
};

/// "12 min left", at the pace since start_ns.
std::string time_left(uint64_t start_ns, uint64_t steps_done, uint64_t steps_left);

}  // namespace smartinf::apps
