#include "smartinf/csd/trace.h"

#include <algorithm>
#include <utility>

namespace smartinf::csd {

Trace::Trace(uint32_t events_max) : events_(events_max) {}

uint32_t Trace::add_track(TraceTrack track) {
  const std::lock_guard lock(mutex_);
  tracks_.push_back(std::move(track));
  return static_cast<uint32_t>(tracks_.size() - 1);
}

void Trace::record(const TraceEvent& event) {
  const uint64_t index = next_.fetch_add(1, std::memory_order_relaxed);
  if (index < events_.size()) events_[index] = event;
}

std::vector<TraceTrack> Trace::tracks() const {
  const std::lock_guard lock(mutex_);
  return tracks_;
}

std::vector<TraceEvent> Trace::events() const {
  const uint64_t count = std::min<uint64_t>(next_.load(), events_.size());
  return {events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(count)};
}

uint64_t Trace::dropped() const {
  const uint64_t recorded = next_.load();
  return recorded > events_.size() ? recorded - events_.size() : 0;
}

}  // namespace smartinf::csd
