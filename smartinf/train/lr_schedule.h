// The learning rate of a step: a linear warm-up, then half a cosine down to a floor.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "smartinf/base/ids.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// step counts from 1. A run shorter than its warm-up ends within it; else the last step and all
/// beyond it have the floor.
inline double learning_rate(const TrainOptions& options, base::StepNumber step) {
  if (step <= options.warmup_steps) {
    return options.lr * static_cast<double>(step) / static_cast<double>(options.warmup_steps);
  }
  const double span =
      static_cast<double>(options.steps) - static_cast<double>(options.warmup_steps);
  const double done =
      std::min(1.0, static_cast<double>(step - options.warmup_steps) / std::max(1.0, span));
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * done));
  return options.lr * (options.lr_floor + (1 - options.lr_floor) * cosine);
}

}  // namespace smartinf::train
