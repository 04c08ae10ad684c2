// Errors of every kind of processor for a job that it cannot do.
#pragma once

#include <string>

#include "smartinf/base/status.h"
#include "smartinf/csd/plane_blocks.h"

namespace smartinf::csd {

inline base::Status damaged_gradient(const PlaneBlocks& planes, uint64_t block) {
  return base::Status(base::ErrorCode::kCorrupt,
                      "block " + std::to_string(block) + " of the spilled gradient of subgroup " +
                          std::to_string(planes.subgroup().id.value) + " is not what was written",
                      "The step is aborted and can be repeated; if it happens again, the drive "
                      "or its cable is failing.");
}

inline base::Status factors_without_variance() {
  return base::Status(base::ErrorCode::kMismatch,
                      "a message with row and column factors of its second moment for a rule "
                      "without Adam's variance",
                      "This is a bug in the engine; please report it.");
}

}  // namespace smartinf::csd
