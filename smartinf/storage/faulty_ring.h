// A ring that misbehaves by seed: the twin that shows what the store does when the system, the
// drive or the path to it fails. Nothing it does is beyond what real ones have been seen to do.
#pragma once

#include <cstdint>
#include <memory>

#include "smartinf/storage/ring.h"

namespace smartinf::storage {

/// Chances per request, 0 to 1. The same seed and the same requests give the same faults.
struct FaultOptions {
  uint64_t seed = 1;
  double short_transfer = 0;  // fewer bytes than asked for
  double interrupted = 0;     // EINTR
  double try_again = 0;       // EAGAIN
  double io_error = 0;        // EIO
  double no_space = 0;        // ENOSPC, writes only
  double delayed = 0;         // completion held back for some reaps: reordered
  double flipped_bit = 0;     // one bit, on the way to the drive or from it; reported as done
  double misdirected = 0;  // a block goes to, or comes from, a neighbour's place; reported as done
  double lost = 0;         // a write that is reported as done and was not
  /// Only requests at or above this offset are treated badly.
  uint64_t from_offset_bytes = 0;
};

/// Counts of what was done so far; for tests that must know that something was.
struct FaultCounts {
  uint64_t requests = 0;
  uint64_t visible = 0;  // reported as an error or a short transfer, or delayed
  uint64_t silent = 0;   // flipped, misdirected, lost
};

/// `counts` may be null; otherwise it outlives the ring.
std::unique_ptr<Ring> make_faulty_ring(std::unique_ptr<Ring> inner, const FaultOptions& options,
                                       FaultCounts* counts);

}  // namespace smartinf::storage
