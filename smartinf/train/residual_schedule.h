// In which steps the residual of compressed gradients is written to the devices.
#pragma once

#include <cstdint>

#include "smartinf/base/ids.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

class ResidualSchedule {
 public:
  /// No residual is written.
  ResidualSchedule() = default;
  /// The engine writes it in every so many steps; step: the one that the devices hold.
  ResidualSchedule(uint64_t every, base::StepNumber step) : every_(every), written_(step) {}

  /// The residual goes to the devices within a step only: a run that is interrupted between two
  /// steps that write it makes one more step, so that it resumes with the same bits.
  bool lags(base::StepNumber step) const {
    return every_ != 0 && step != written_ && step % every_ != 0;
  }
  /// The engine is told to write it in this step: a checkpoint or the end of the run follows.
  bool must_write(base::StepNumber step, const Options& options, bool stops) const {
    const uint64_t checkpoint_every = options.checkpoint.every;
    const uint64_t validate_every = options.train.keep_best ? options.train.validate_every : 0;
    const bool checkpoint_comes = (checkpoint_every != 0 && step % checkpoint_every == 0) ||
                                  (validate_every != 0 && step % validate_every == 0);
    return every_ != 0 && (step == options.train.steps || checkpoint_comes || stops);
  }
  void wrote(base::StepNumber step) { written_ = step; }

 private:
  uint64_t every_ = 0;
  base::StepNumber written_ = 0;  // the last step of ours that was made to write it
};

}  // namespace smartinf::train
