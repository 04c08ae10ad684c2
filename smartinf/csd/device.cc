#include "smartinf/csd/device.h"

#include <algorithm>
#include <utility>

#include "smartinf/csd/snapshot.h"

namespace smartinf::csd {
namespace {

// A wait beyond it would overflow the clock's arithmetic.
constexpr auto kWaitMax = std::chrono::hours(24);

}  // namespace

base::Status Device::cache_state(std::span<const base::SubgroupId> subgroups) {
  if (subgroups.empty()) return base::Status();
  return base::Status(base::ErrorCode::kUnsupported,
                      "a " + info().kind + " device keeps no state in memory", {});
}

base::Result<std::unique_ptr<Snapshot>> Device::snapshot() {
  return base::Status(base::ErrorCode::kUnsupported,
                      "a " + info().kind + " device gives no snapshot of its state", {});
}

void CompletionQueue::push(Completion completion) {
  // Notified under the lock: the waiter may destroy the queue as soon as it has its last entry.
  const std::lock_guard lock(mutex_);
  entries_.push_back(std::move(completion));
  filled_.notify_one();
}

bool CompletionQueue::pop(Completion& out, std::chrono::nanoseconds wait) {
  std::unique_lock lock(mutex_);
  if (!filled_.wait_for(lock, std::min<std::chrono::nanoseconds>(wait, kWaitMax),
                        [&] { return !entries_.empty(); }))
    return false;
  out = std::move(entries_.front());
  entries_.pop_front();
  return true;
}

}  // namespace smartinf::csd
