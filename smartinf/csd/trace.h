// What a device's threads and links did when: recorded into a fixed buffer while tracing is on, and
// written by an app as a Chrome trace, one track per thread and link.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace smartinf::csd {

struct TraceEvent {
  const char* name = "";  // a literal: the task's kind
  uint32_t track = 0;     // from Trace::add_track
  uint32_t subgroup = 0;  // as numbered in the parameter space
  uint64_t begin_ns = 0;  // monotonic clock
  uint64_t end_ns = 0;
  uint64_t bytes = 0;
};

/// Bound: `events_max` events; later ones are counted and dropped.
/// Threads: add_track and record are safe from any thread; record takes no lock and does not
/// allocate. Reading is for when recording has ended (devices closed or idle).
class Trace {
 public:
  explicit Trace(uint32_t events_max = 1u << 20);

  /// A track's number; `name` is what the viewer shows.
  uint32_t add_track(std::string name);
  void record(const TraceEvent& event);

  std::vector<std::string> tracks() const;
  std::vector<TraceEvent> events() const;
  uint64_t dropped() const;

 private:
  mutable std::mutex mutex_;  // of tracks_
  std::vector<std::string> tracks_;
  std::vector<TraceEvent> events_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace smartinf::csd
