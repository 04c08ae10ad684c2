// A Chrome trace (JSON), which Perfetto (ui.perfetto.dev) and chrome://tracing open.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::apps {

struct TraceSpan {
  std::string name;
  std::string track;
  uint64_t begin_ns = 0;  // monotonic clock
  uint64_t end_ns = 0;
  std::string detail;  // shown when the span is chosen; may be empty
};

/// Tracks are shown in the order of their first span.
base::Status write_trace(const std::string& path, const std::vector<TraceSpan>& spans);

}  // namespace smartinf::apps
