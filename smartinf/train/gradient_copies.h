// Brings gradients from an accelerator to the host's memory, through two buffers on a stream of its
// own: one is copied while the one before it is sent on.
#pragma once

#include <array>
#include <cstdint>
#include <deque>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/types.h>

namespace smartinf::train {

/// Threads: one caller. Errors: torch throws.
class GradientCopies {
 public:
  /// Pinned memory for two gradients of at most `elements` each is allocated here.
  GradientCopies(torch::Device accelerator, torch::ScalarType type, uint64_t elements);
  /// Waits for copies.
  ~GradientCopies();
  GradientCopies(const GradientCopies&) = delete;
  GradientCopies& operator=(const GradientCopies&) = delete;

  /// Copies it once the current stream has made it: contiguous, of the type. Not while full().
  void start(uint64_t first, const torch::Tensor& gradient);
  bool full() const { return under_way_.size() == buffers_.size(); }
  bool empty() const { return under_way_.empty(); }

  struct Copied {
    uint64_t first = 0;
    uint64_t count = 0;
    const void* values = nullptr;  // until the next start()
  };
  /// The oldest one, when it has come. Not while empty().
  Copied next();

 private:
  struct Buffer {
    torch::Tensor values_N;
    c10::Event copied;
  };

  const torch::Device accelerator_;
  const c10::Stream copies_;
  std::array<Buffer, 2> buffers_;
  std::deque<Copied> under_way_;
  size_t started_ = 0;  // of all time: the next one's buffer
};

}  // namespace smartinf::train
