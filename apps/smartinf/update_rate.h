// What the simulator is told about an update of this engine: its bytes, and how fast this machine's
// cores run its kernel.
#pragma once

#include <cstdint>

#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/update_rule.h"

namespace smartinf::apps {

/// Parameters per second of AdamW on `threads` threads at once, over buffers beyond the caches,
/// with a bf16 gradient and bf16 weights out; the best of five passes of some ten milliseconds
/// each. Errors: kOutOfMemory.
base::Result<double> measure_update_rate(base::StateFormat format, uint32_t threads);

/// Bytes of state per parameter, block scales included.
struct StateBytes {
  double master = 0;
  double moments = 0;
};
StateBytes state_bytes_per_parameter(kernels::UpdateRule rule, base::StateFormat format);

}  // namespace smartinf::apps
