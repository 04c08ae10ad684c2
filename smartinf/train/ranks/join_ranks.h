// The collective calls of a run's ranks (engine/ranks/collectives.h), over torch's process groups:
// gloo. Needs torch to link, not to include.
#pragma once

#include <chrono>

#include "smartinf/base/status.h"
#include "smartinf/train/ranks/environment.h"
#include "smartinf/train/ranks/ranks.h"

namespace smartinf::train {

/// Meets the other ranks and connects to each of them. timeout: of this, and of everything that
/// ranks wait for: one that has ended, gives no sign of life for so long, or does not come to a
/// call for so long is named to all others, whose calls then fail. Errors: kTimeout, kIo; each
/// names the rank. From here on SIGPIPE is ignored, which would come from a connection whose other
/// end is gone, and torch's log is set to fatal errors, unless TORCH_CPP_LOG_LEVEL says otherwise.
base::Result<Ranks> join_ranks(const RankEnvironment& environment,
                               std::chrono::milliseconds timeout);

}  // namespace smartinf::train
