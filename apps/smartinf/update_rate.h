// Bytes and rates of an update of this engine, for the simulator: what it moves, and how fast this
// machine's cores do its work.
#pragma once

#include <cstdint>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/options.h"
#include "smartinf/kernels/update_rule.h"

namespace smartinf::apps {

// Each is the median of five passes of some ten milliseconds, over buffers beyond the caches.
// Errors: kOutOfMemory.

/// The work of a processor on a block of AdamW's state, with a bf16 gradient and bf16 weights out.
struct ProcessorWork {
  base::StateFormat format = base::StateFormat::kF32;
  bool checksums = false;  // every block is verified and sealed
  compress::CompressOptions compress =
      {};  // on: what is sent is expanded, variance aged by factors
};
/// Parameters per second on `threads` threads at once.
base::Result<double> measure_update_rate(const ProcessorWork& work, uint32_t threads);

/// Parameters per second at which so many threads of the host together copy gradients and find
/// their norm.
base::Result<double> measure_gradient_rate(base::DataType type, uint32_t threads);

/// Bytes per second that so many threads copy at once.
base::Result<double> measure_copy_rate(uint32_t threads);

/// How many threads of the host select from gradients, and parameters per second at which each adds
/// what was not sent, selects the largest of a gradient and packs them, and at which the device
/// checks the message.
struct SelectRate {
  uint32_t threads = 1;
  double params_per_s = 0;
};
base::Result<SelectRate> measure_select_rate(const compress::CompressOptions& compress);

/// Weights per second that one thread takes ahead by what was not sent.
base::Result<double> measure_step_ahead_rate();

/// Bytes of state per parameter, block scales included.
struct StateBytes {
  double master = 0;
  double moments = 0;
};
StateBytes state_bytes_per_parameter(kernels::UpdateRule rule, base::StateFormat format);

}  // namespace smartinf::apps
