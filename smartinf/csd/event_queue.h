// Queue of what other threads leave for a device's I/O thread: commands and gradients from the
// caller, finished jobs from the processor. The I/O thread takes everything at once, and sleeps
// here while its store has nothing to do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "smartinf/csd/device.h"
#include "smartinf/csd/gradient_memory.h"
#include "smartinf/csd/processor.h"

namespace smartinf::csd {

/// A piece of a gradient has been copied.
struct GradientTaken {
  std::optional<GradientMemory::Spill> spill;  // to be written to the spill area
  std::optional<uint32_t> completed;           // a subgroup whose gradient is in memory now
  Command* command = nullptr;                  // to be answered...
  uint64_t due_ns = 0;                         // ...when it has passed the host link; null: it was
};

using Event = std::variant<Command*, GradientTaken, Job*>;

/// Bound: one event per command in flight, one per subgroup and one per slot.
class EventQueue {
 public:
  void post(Event event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    filled_.notify_one();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    filled_.notify_one();
  }

  /// Moves what is there into the list (emptied first); waits up to `wait` for something.
  /// Returns whether close() was called.
  bool take(std::vector<Event>& events, std::chrono::nanoseconds wait) {
    events.clear();
    std::unique_lock lock(mutex_);
    if (wait.count() > 0) {
      filled_.wait_for(lock, wait, [&] { return closed_ || !events_.empty(); });
    }
    events.swap(events_);
    return closed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable filled_;
  std::vector<Event> events_;
  bool closed_ = false;
};

}  // namespace smartinf::csd
