// How fast this machine's cores continue sequences, for the simulator (sim::Host,
// sim::DeviceGroup).
#pragma once

#include <cstdint>

#include "smartinf/base/status.h"

namespace smartinf::apps {

/// Of `threads` threads together; each the median of five passes over buffers beyond the caches.
struct DecodeRates {
  double weight_bytes_per_s = 0;  // products of one row with bf16 weights
  double flops = 0;               // of 16 rows
  /// bf16 keys and values of heads of 128 channels that are verified and folded, 4 queries to a
  /// head of keys.
  double fold_bytes_per_s = 0;
};
/// Errors: kOutOfMemory.
base::Result<DecodeRates> measure_decode_rates(uint32_t threads);

}  // namespace smartinf::apps
