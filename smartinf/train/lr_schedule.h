// The learning rate of a step: a linear warm-up, then what train.schedule says.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "smartinf/base/ids.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// Share of lr above its floor that is left, from 1 to 0. step counts from 1 and is behind the
/// warm-up.
inline double schedule_share(const TrainOptions& options, base::StepNumber step) {
  const auto steps = static_cast<double>(options.steps);
  const double span = steps - static_cast<double>(options.warmup_steps);
  const double done =
      std::min(1.0, static_cast<double>(step - options.warmup_steps) / std::max(1.0, span));
  switch (options.schedule) {
    case LrSchedule::kCosine:
      return 0.5 * (1 + std::cos(std::numbers::pi * done));
    case LrSchedule::kLinear:
      return 1 - done;
    case LrSchedule::kConstant:
      return 1;
    case LrSchedule::kWarmupStableDecay: {
      const double decay = options.decay_share * steps;
      const double left = std::max(0.0, steps - static_cast<double>(step));
      return decay > 0 ? std::min(1.0, left / decay) : 1;
    }
  }
  return 1;
}

/// step counts from 1. A run shorter than its warm-up ends within it; else the last step and all
/// beyond it have the floor, unless the rate is constant.
inline double learning_rate(const TrainOptions& options, base::StepNumber step) {
  if (step <= options.warmup_steps) {
    return options.lr * static_cast<double>(step) / static_cast<double>(options.warmup_steps);
  }
  const double share = schedule_share(options, step);
  if (share == 1) return options.lr;
  return options.lr * (options.lr_floor + (1 - options.lr_floor) * share);
}

}  // namespace smartinf::train
