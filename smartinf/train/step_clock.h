// The clock of training steps: how long a step takes, and what of it was waiting.
#pragma once

#include <cstdint>
#include <utility>

#include "smartinf/base/clock.h"
#include "smartinf/train/step_report.h"

namespace smartinf::train {

/// waited_s: seconds waited for weights, of all time (UnitPass::waited_s).
/// Threads: one caller. A step: begin, passed ..., update_begins, updated, report.
class StepClock {
 public:
  void begin(double waited_s) {
    begin_ns_ = base::now_ns();
    weights_waited_s_ = waited_s;
  }
  /// A pass has ended, which began at forward_ns and waited for weights so long in each direction.
  void passed(StepReport& report, uint64_t forward_ns, uint64_t backward_ns,
              double forward_waited_s, double backward_waited_s) const {
    const uint64_t end_ns = base::now_ns();
    report.forward_s += static_cast<double>(backward_ns - forward_ns) * 1e-9 - forward_waited_s;
    report.backward_s += static_cast<double>(end_ns - backward_ns) * 1e-9 - backward_waited_s;
    report.phases.push_back({"forward", forward_ns, backward_ns});
    report.phases.push_back({"backward", backward_ns, end_ns});
  }
  void update_begins() { update_ns_ = base::now_ns(); }
  /// The commit of the step before was waited for.
  void waited_for_commit(double seconds) { commit_waited_s_ += seconds; }
  void updated() { end_ns_ = base::now_ns(); }
  /// Counts the part of the update that follows the report to the next report.
  void waited_after_step(double seconds) { after_step_s_ = seconds; }

  void report(StepReport& report, double waited_s) {
    const double before_s = std::exchange(after_step_s_, 0);
    report.seconds = static_cast<double>(end_ns_ - begin_ns_) * 1e-9 + before_s;
    report.update_s =
        report.seconds - report.forward_s - report.backward_s - report.pipeline_wait_s;
    report.exposed_s = std::exchange(commit_waited_s_, 0) + waited_s - weights_waited_s_ + before_s;
    report.phases.push_back({"update", update_ns_, end_ns_});
  }

 private:
  uint64_t begin_ns_ = 0;
  uint64_t update_ns_ = 0;
  uint64_t end_ns_ = 0;
  double weights_waited_s_ = 0;  // when the step began
  double commit_waited_s_ = 0;   // since the report before
  double after_step_s_ = 0;      // of the step before, where its update followed the report
};

}  // namespace smartinf::train
