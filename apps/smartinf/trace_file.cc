#include "apps/smartinf/trace_file.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

namespace smartinf::apps {

base::Status write_trace(const std::string& path, const std::vector<TraceSpan>& spans) {
  using Json = nlohmann::ordered_json;
  std::ofstream out(path);
  uint64_t start_ns = spans.empty() ? 0 : spans.front().begin_ns;
  for (const TraceSpan& span : spans) start_ns = std::min(start_ns, span.begin_ns);
  std::map<std::string, size_t> tracks;
  out << "{\"traceEvents\":[";
  const char* comma = "\n";
  for (const TraceSpan& span : spans) {
    const auto [track, is_new] = tracks.emplace(span.track, tracks.size() + 1);
    if (is_new) {
      out << comma
          << Json{{"ph", "M"},
                  {"name", "thread_name"},
                  {"pid", 1},
                  {"tid", track->second},
                  {"args", {{"name", span.track}}}};
      comma = ",\n";
    }
    // Times are in microseconds.
    Json event = {{"ph", "X"},
                  {"name", span.name},
                  {"pid", 1},
                  {"tid", track->second},
                  {"ts", static_cast<double>(span.begin_ns - start_ns) * 1e-3},
                  {"dur", static_cast<double>(span.end_ns - span.begin_ns) * 1e-3}};
    if (!span.detail.empty()) event["args"] = {{"detail", span.detail}};
    out << comma << event;
  }
  out << "\n]}\n";
  out.close();
  if (!out) return base::errno_status(errno, "cannot write the trace", path);
  return base::Status();
}

}  // namespace smartinf::apps
