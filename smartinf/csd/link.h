// A path with a bandwidth and a latency. It moves no data: whoever moves data books the transfer
// and holds back its completion until the time the link names. So any device can stand behind any
// links.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "smartinf/base/traffic.h"
#include "smartinf/csd/trace.h"

namespace smartinf::csd {

/// Up is towards the host (a read of the store, new weights); down is away from it.
enum class LinkDirection : uint8_t { kUp, kDown };

struct LinkOptions {
  std::string name = "link";
  double up_bytes_per_s = 0;    // 0: no limit
  double down_bytes_per_s = 0;  // 0: no limit
  /// Both directions draw on one budget of time, as on a drive whose reads and writes compete.
  bool shared_budget = false;
  std::chrono::nanoseconds latency{0};
};

/// A token bucket on the monotonic clock. Each booking takes bytes / rate of the link's time behind
/// all earlier ones; time unused for longer than kCatchUp is lost. Several devices may share a
/// link. Threads: safe from any thread.
class Link {
 public:
  /// A sender that is woken late by the operating system may catch up this much, no more.
  static constexpr std::chrono::nanoseconds kCatchUp = std::chrono::milliseconds(2);

  explicit Link(LinkOptions options);

  const LinkOptions& options() const { return options_; }

  /// Counts the bytes and returns when they will have passed, in base::now_ns() time.
  uint64_t book(LinkDirection direction, base::TrafficKind kind, uint64_t bytes);

  base::TrafficReading traffic() const { return traffic_.read(); }
  /// Records each booking from now on; before the first one. `trace` outlives the link's use.
  void set_trace(Trace* trace);

 private:
  LinkOptions options_;
  base::TrafficCounter traffic_;
  Trace* trace_ = nullptr;
  std::atomic<uint64_t> bookings_{0};
  uint32_t up_track_ = 0;
  uint32_t down_track_ = 0;
  std::mutex mutex_;
  uint64_t up_free_ns_ = 0;    // when the last booking upwards will have passed
  uint64_t down_free_ns_ = 0;  // likewise; unused with a shared budget
};

}  // namespace smartinf::csd
