// The streams on which copies between the host and an accelerator run, beside the one on which the
// model computes: one for each direction, so that weights come up while gradients go down. All
// copies of a trainer share them.
#pragma once

#include <optional>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include "smartinf/base/unified_memory.h"

namespace smartinf::train {

/// Threads: as torch's streams.
class CopyStreams {
 public:
  /// device: the CPU has none.
  explicit CopyStreams(torch::Device device) : device_(device) {
    if (device.is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    in_place_ = base::memory_is_unified();
    up_ = guard.getStreamFromGlobalPool(device);
    down_ = guard.getStreamFromGlobalPool(device);
  }

  torch::Device device() const { return device_; }
  bool beside() const { return up_.has_value(); }
  /// The accelerator computes in the host's memory: weights are where they are.
  bool in_place() const { return in_place_; }

  // ---- Beside an accelerator.

  const c10::Stream& up() const { return *up_; }
  const c10::Stream& down() const { return *down_; }
  /// The caller's, on which the model computes.
  c10::Stream current() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }
  c10::Event event() const { return c10::Event(device_.type()); }
  /// What the current stream has been given so far.
  c10::Event done_so_far() const {
    c10::Event event(device_.type());
    event.record(current());
    return event;
  }

 private:
  const torch::Device device_;
  bool in_place_ = false;
  std::optional<c10::Stream> up_;
  std::optional<c10::Stream> down_;
};

}  // namespace smartinf::train
