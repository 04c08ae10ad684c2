// Brings gradients from an accelerator to the host's memory, through a ring on a stream of its own:
// the caller waits for a copy only where the ring has no room for the next one.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include <c10/core/Event.h>
#include <torch/types.h>

#include "smartinf/train/copy_streams.h"

namespace smartinf::train {

/// Threads: one caller. Errors: torch throws.
class GradientCopies {
 public:
  /// Pinned memory for `elements` is allocated here: for each gradient, and better for those of a
  /// unit, which backward makes at once. The streams outlive this.
  GradientCopies(const CopyStreams& streams, torch::ScalarType type, uint64_t elements);
  /// Waits for copies.
  ~GradientCopies();
  GradientCopies(const GradientCopies&) = delete;
  GradientCopies& operator=(const GradientCopies&) = delete;

  /// Whether there is room for so many elements.
  bool fits(uint64_t elements) const { return place_for(elements).has_value(); }
  /// Copies it once the current stream has made it: contiguous, of the type. Not if it does not
  /// fit.
  void start(uint64_t first, const torch::Tensor& gradient);
  bool empty() const { return under_way_.empty(); }
  /// Whether next() would not wait. Not while empty().
  bool next_is_there() const { return under_way_.front().copied.query(); }

  struct Copied {
    uint64_t first = 0;
    uint64_t count = 0;
    const void* values = nullptr;  // until the next start()
  };
  /// The oldest one, when it has come. Not while empty().
  Copied next();

 private:
  struct Copy {
    Copied copied_to;
    uint64_t at = 0;  // in the ring
    c10::Event copied;
  };
  std::optional<uint64_t> place_for(uint64_t elements) const;

  const CopyStreams& streams_;
  torch::Tensor ring_N_;
  std::deque<Copy> under_way_;  // oldest first
  uint64_t end_ = 0;            // of the newest one
};

}  // namespace smartinf::train
