// A Chrome trace (JSON), which Perfetto (ui.perfetto.dev) and chrome://tracing open.
#pragma once

#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/trace.h"
#include "smartinf/sim/step.h"

namespace smartinf::apps {

/// Each group of tracks is shown as a process and each track as a thread, in the order in which
/// they were added. Spans of a track that overlap are laid out on further threads ("read 2"), so
/// that on every thread one span ends before the next begins. Bytes are counted up per group, track
/// and kind ("read, state bytes"). How many events were dropped is in otherData. Errors: the file
/// cannot be written.
base::Status write_trace(const std::string& path, const csd::Trace& trace);
/// Of simulated spans.
base::Status write_spans(const std::string& path, const std::vector<sim::Span>& spans);

}  // namespace smartinf::apps
