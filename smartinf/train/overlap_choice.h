// Choice of what the updates of a run are hidden behind, step by step.
#pragma once

#include "smartinf/engine/early_update_pays.h"
#include "smartinf/engine/updater.h"
#include "smartinf/train/options.h"
#include "smartinf/train/step_report.h"

namespace smartinf::train {

/// Threads: one caller. A step: choose(), then stepped() if it was made.
class OverlapChoice {
 public:
  /// wanted: optimizer.overlap; kNone where the updater hides nothing.
  OverlapChoice(Overlap wanted, double clip_norm) : wanted_(wanted), clip_norm_(clip_norm) {}

  /// Overlap of the step in progress; never kAuto.
  Overlap now() const { return now_; }
  /// last: nothing is computed behind the step.
  void choose(bool last, const engine::Updater& updater) {
    if (wanted_ == Overlap::kNone || wanted_ == Overlap::kEarly) {
      now_ = wanted_;
    } else if (wanted_ == Overlap::kAuto &&
               engine::early_update_pays(norm_, clip_norm_, late_exposed_, last) &&
               updater.early_update_possible().ok()) {
      now_ = Overlap::kEarly;
    } else {
      now_ = last ? Overlap::kNone : Overlap::kLate;
    }
  }
  void stepped(const StepReport& report) {
    norm_ = report.gradient_norm;
    if (now_ == Overlap::kLate) late_exposed_ = report.exposed_s / report.seconds;
  }

 private:
  const Overlap wanted_;
  const double clip_norm_;
  Overlap now_ = Overlap::kNone;
  double norm_ = 0;          // of the last step; 0: there was none
  double late_exposed_ = 0;  // share of the last late step that was waited for
};

}  // namespace smartinf::train
