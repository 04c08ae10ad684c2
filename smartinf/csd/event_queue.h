// What other threads leave for a device's I/O thread: commands from the caller, finished work from
// the processor. The I/O thread takes everything at once, and sleeps here while its store has
// nothing to do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "smartinf/csd/device.h"
#include "smartinf/csd/gradient_memory.h"
#include "smartinf/csd/processor.h"

namespace smartinf::csd {

/// One thing from the caller's thread, in the order in which it came.
struct DeviceEvent {
  Command* command = nullptr;  // null: only what follows
  uint64_t due_ns = 0;         // of a gradient: when it will have passed the host link
  std::optional<GradientMemory::Spill> spill;  // a gradient to write to the spill area
  std::optional<uint32_t> completed;           // a subgroup whose gradient is in memory now
};

/// Bound: one event per command in flight and one per subgroup; one work per slot.
class EventQueue {
 public:
  void post(DeviceEvent event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    filled_.notify_one();
  }
  void post(BlockWork& work) {
    const std::lock_guard lock(mutex_);
    works_.push_back(&work);
    filled_.notify_one();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    filled_.notify_one();
  }

  /// Moves what is there into the two lists (emptied first); waits up to `wait` for something.
  /// Returns whether close() was called.
  bool take(std::vector<DeviceEvent>& events, std::vector<BlockWork*>& works,
            std::chrono::nanoseconds wait) {
    events.clear();
    works.clear();
    std::unique_lock lock(mutex_);
    if (wait.count() > 0) {
      filled_.wait_for(lock, wait, [&] { return closed_ || !events_.empty() || !works_.empty(); });
    }
    events.swap(events_);
    works.swap(works_);
    return closed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::vector<DeviceEvent> events_;
  std::vector<BlockWork*> works_;
  bool closed_ = false;
};

}  // namespace smartinf::csd
