// How fast this machine's CPU multiplies matrices as the trainer does, for the planner.
#pragma once

#include "smartinf/base/status.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// Multiply-adds times two per second of [2048, 1024] x [1024, 1024]: the median of nine products
/// on all cores, after two that are not counted. Takes a second at most.
/// Errors: kUnsupported in a build without torch; kOutOfMemory.
base::Result<double> measure_product_rate(Precision precision);

}  // namespace smartinf::train
