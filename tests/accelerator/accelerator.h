// Calls for programs that test with the accelerator. The library registers itself with torch when
// it is loaded (linked, dlopen or LD_PRELOAD); its options come from the environment (README.md).
#pragma once

#include <cstdint>

namespace smartinf::test_accelerator {

struct Options {
  uint64_t memory_bytes = 0;      // that tensors may take; 0: no cap
  uint64_t link_bytes_per_s = 0;  // of the host's link, in each direction; 0: as fast as memory
  uint32_t delay_us = 0;          // from the call of a copy to its earliest start
  /// Throw c10::Error where streams touch the same bytes and no event or host wait orders them.
  bool check_order = true;
};

struct Memory {
  uint64_t current_bytes;  // of tensors, each rounded up to 512
  uint64_t peak_bytes;     // the highest since the last reset
};

// From any thread.
extern "C" {
/// Waits for all streams, and forgets what was noted of their order.
void smartinf_test_accelerator_set_options(const Options* options);
Memory smartinf_test_accelerator_memory();
void smartinf_test_accelerator_reset_peak();
/// Memory of the caller's counts as pinned, from `address` on, until it is unpinned.
void smartinf_test_accelerator_pin(const void* address, uint64_t bytes);
void smartinf_test_accelerator_unpin(const void* address);
/// While held, no copy between host and device begins: late without a delay. Whoever waits for one
/// waits until they are let go.
void smartinf_test_accelerator_hold_copies(bool hold);
/// Errors of check_order since the options were set: also those that someone caught.
uint64_t smartinf_test_accelerator_order_errors();
}

}  // namespace smartinf::test_accelerator
