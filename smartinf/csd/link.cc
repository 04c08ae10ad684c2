#include "smartinf/csd/link.h"

#include <algorithm>
#include <utility>

#include "smartinf/base/clock.h"

namespace smartinf::csd {

Link::Link(LinkOptions options) : options_(std::move(options)) {}

void Link::set_trace(Trace* trace) {
  trace_ = trace;
  if (trace_ == nullptr) return;
  up_track_ = trace_->add_track({options_.name, "up", "booking"});
  down_track_ = trace_->add_track({options_.name, "down", "booking"});
}

uint64_t Link::book(LinkDirection direction, base::TrafficKind kind, uint64_t bytes) {
  const bool up = direction == LinkDirection::kUp;
  if (up) {
    traffic_.add_up(kind, bytes);
  } else {
    traffic_.add_down(kind, bytes);
  }
  const double rate = up ? options_.up_bytes_per_s : options_.down_bytes_per_s;
  const auto taken_ns =
      rate > 0 ? static_cast<uint64_t>(static_cast<double>(bytes) / rate * 1e9) : 0;
  const uint64_t now = base::now_ns();
  const auto catch_up = static_cast<uint64_t>(kCatchUp.count());
  uint64_t begin = 0;
  uint64_t end = 0;
  {
    const std::lock_guard lock(mutex_);
    uint64_t& free_ns = up || options_.shared_budget ? up_free_ns_ : down_free_ns_;
    begin = std::max(free_ns, now - std::min(now, catch_up));
    end = begin + taken_ns;
    free_ns = end;
  }
  if (trace_ != nullptr) {
    trace_->record({base::traffic_kind_name(kind).data(), up ? up_track_ : down_track_,
                    bookings_.fetch_add(1, std::memory_order_relaxed), begin, end, bytes, kind});
  }
  return std::max(end, now) + static_cast<uint64_t>(options_.latency.count());
}

}  // namespace smartinf::csd
