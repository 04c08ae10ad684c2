#include "apps/smartinf/trace_file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <map>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace smartinf::apps {
namespace {

using csd::TraceEvent;
using csd::TraceTrack;
using Json = nlohmann::ordered_json;

class Writer {
 public:
  Writer(std::ostream& out, const csd::Trace& trace)
      : out_(out), tracks_(trace.tracks()), events_(trace.events()), of_track_(tracks_.size()) {
    for (const TraceEvent& event : events_) of_track_[event.track].push_back(&event);
    if (!events_.empty()) start_ns_ = events_.front().begin_ns;
    for (const TraceEvent& event : events_) start_ns_ = std::min(start_ns_, event.begin_ns);
  }

  void write(uint64_t dropped) {
    out_ << "{\"displayTimeUnit\":\"ms\",\"otherData\":"
         << Json{{"dropped_events", dropped}, {"start_ns", start_ns_}} << ",\"traceEvents\":[";
    for (size_t track = 0; track < tracks_.size(); ++track) {
      group(tracks_[track].group);
      spans(track);
      counters(track);
    }
    out_ << "\n]}\n";
  }

 private:
  // Times are in microseconds.
  double at(uint64_t ns) const { return static_cast<double>(ns - start_ns_) * 1e-3; }

  void put(const Json& event) {
    out_ << (first_ ? "\n" : ",\n") << event;
    first_ = false;
  }

  void name(const char* what, size_t process, size_t thread, const std::string& name) {
    put({{"ph", "M"},
         {"name", what},
         {"pid", process},
         {"tid", thread},
         {"args", {{"name", name}}}});
  }
  void order(const char* what, size_t process, size_t thread) {
    put({{"ph", "M"},
         {"name", what},
         {"pid", process},
         {"tid", thread},
         {"args", {{"sort_index", thread == 0 ? process : thread}}}});
  }

  void group(const std::string& title) {
    const auto [found, fresh] = processes_.emplace(title, processes_.size() + 1);
    process_ = found->second;
    if (!fresh) return;
    name("process_name", process_, 0, title);
    order("process_sort_index", process_, 0);
  }

  void spans(size_t track) {
    std::vector<const TraceEvent*>& mine = of_track_[track];
    std::stable_sort(mine.begin(), mine.end(), [](const TraceEvent* a, const TraceEvent* b) {
      return a->begin_ns < b->begin_ns;
    });
    struct Lane {
      size_t thread;
      uint64_t end_ns;
    };
    std::vector<Lane> lanes;
    for (const TraceEvent* event : mine) {
      auto lane = std::find_if(lanes.begin(), lanes.end(),
                               [&](const Lane& l) { return l.end_ns <= event->begin_ns; });
      if (lane == lanes.end()) {
        lane = lanes.insert(lane, {++threads_, 0});
        const std::string& title = tracks_[track].name;
        name("thread_name", process_, threads_,
             lanes.size() == 1 ? title : fmt::format("{} {}", title, lanes.size()));
        order("thread_sort_index", process_, threads_);
      }
      lane->end_ns = event->end_ns;
      Json args = {{tracks_[track].number_name, event->number}};
      if (event->bytes > 0) args["bytes"] = event->bytes;
      put({{"ph", "X"},
           {"name", event->name},
           {"pid", process_},
           {"tid", lane->thread},
           {"ts", at(event->begin_ns)},
           {"dur", static_cast<double>(event->end_ns - event->begin_ns) * 1e-3},
           {"args", args}});
    }
  }

  void counters(size_t track) {
    std::vector<const TraceEvent*>& mine = of_track_[track];
    std::stable_sort(mine.begin(), mine.end(), [](const TraceEvent* a, const TraceEvent* b) {
      return a->end_ns < b->end_ns;
    });
    std::array<uint64_t, base::kTrafficKinds> sums{};
    for (const TraceEvent* event : mine) {
      if (event->bytes == 0) continue;
      uint64_t& sum = sums[static_cast<size_t>(event->kind)];
      sum += event->bytes;
      put({{"ph", "C"},
           {"name",
            fmt::format("{}, {} bytes", tracks_[track].name, base::traffic_kind_name(event->kind))},
           {"pid", process_},
           {"ts", at(event->end_ns)},
           {"args", {{"bytes", sum}}}});
    }
  }

  std::ostream& out_;
  const std::vector<TraceTrack> tracks_;
  const std::vector<TraceEvent> events_;
  std::vector<std::vector<const TraceEvent*>> of_track_;
  uint64_t start_ns_ = 0;
  bool first_ = true;
  std::map<std::string, size_t> processes_;
  size_t process_ = 0;
  size_t threads_ = 0;
};

}  // namespace

base::Status write_trace(const std::string& path, const csd::Trace& trace) {
  std::ofstream out(path);
  Writer(out, trace).write(trace.dropped());
  out.close();
  if (!out) return base::errno_status(errno, "cannot write the trace", path);
  return base::Status();
}

base::Status write_spans(const std::string& path, const std::vector<sim::Span>& spans) {
  csd::Trace trace(static_cast<uint32_t>(spans.size()));
  std::map<std::string, uint32_t> tracks;  // in the order of their names
  for (const sim::Span& span : spans) tracks.emplace(span.lane, 0);
  for (auto& [lane, track] : tracks) track = trace.add_track({lane, lane, "span"});
  const auto ns = [](double seconds) { return static_cast<uint64_t>(std::llround(seconds * 1e9)); };
  for (uint64_t i = 0; i < spans.size(); ++i) {
    const sim::Span& span = spans[i];
    trace.record({span.name.c_str(), tracks.at(span.lane), i, ns(span.start_s), ns(span.end_s)});
  }
  return write_trace(path, trace);
}

}  // namespace smartinf::apps
