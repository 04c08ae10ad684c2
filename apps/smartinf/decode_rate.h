// How fast this machine's cores continue sequences, for the simulator (sim::Host,
// sim::DeviceGroup).
#pragma once

#include <cstdint>

#include "smartinf/base/status.h"

namespace smartinf::apps {

/// Of `threads` threads together; each the median of five passes over buffers beyond the caches.
struct DecodeRates {
  double weight_bytes_per_s = 0;  // products of one row with bf16 weights
  double flops = 0;               // of 16 rows, without what each output takes
  double value_s = 0;    // an output of a row: its end, and a layer's work between products
  double product_s = 0;  // a product by itself: threads that begin and end it
  /// bf16 keys and values of heads of 128 channels that are verified and folded, 4 queries to a
  /// head of keys.
  double fold_bytes_per_s = 0;
};
/// Errors: kOutOfMemory.
base::Result<DecodeRates> measure_decode_rates(uint32_t threads);

}  // namespace smartinf::apps
