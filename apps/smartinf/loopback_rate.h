// How fast processes of this machine send to each other.
#pragma once

#include "smartinf/base/status.h"

namespace smartinf::apps {

/// Bytes per second over one TCP connection on 127.0.0.1, both directions at once and together: the
/// median of five passes of some ten milliseconds. Errors: kIo.
base::Result<double> measure_loopback_rate();

}  // namespace smartinf::apps
