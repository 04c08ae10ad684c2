// Trace of a device's threads and links: recorded into a fixed buffer while tracing is on, and
// written by an app as a Chrome trace, one group of tracks per device and link.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "smartinf/base/traffic.h"

namespace smartinf::csd {

/// The place of a track in the viewer: `name` within `group` (a device or a link).
struct TraceTrack {
  std::string group;
  std::string name;
  std::string number_name = "subgroup";  // the noun of TraceEvent::number
  friend bool operator==(const TraceTrack&, const TraceTrack&) = default;
};

struct TraceEvent {
  const char* name = "";  // a literal: the task's kind
  uint32_t track = 0;     // from Trace::add_track; events of one track may overlap
  uint64_t number = 0;    // subgroup as numbered in the parameter space, or what the track says
  uint64_t begin_ns = 0;  // monotonic clock
  uint64_t end_ns = 0;
  uint64_t bytes = 0;  // bytes that passed; 0: none, and `kind` says nothing
  base::TrafficKind kind = base::TrafficKind::kState;
};

/// Bound: `events_max` events; later ones are counted and dropped.
/// Threads: add_track and record are safe from any thread; record takes no lock and does not
/// allocate. Reading is for when recording has ended (devices closed or idle).
class Trace {
 public:
  explicit Trace(uint32_t events_max = 1u << 20);

  /// A track's number.
  uint32_t add_track(TraceTrack track);
  void record(const TraceEvent& event);

  std::vector<TraceTrack> tracks() const;
  std::vector<TraceEvent> events() const;
  uint64_t dropped() const;

 private:
  mutable std::mutex mutex_;  // of tracks_
  std::vector<TraceTrack> tracks_;
  std::vector<TraceEvent> events_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace smartinf::csd
