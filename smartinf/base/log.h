// Where libraries leave remarks (a fallback taken, a retry). They never print; an app installs a sink.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace smartinf::base {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning };

using LogSink = std::function<void(LogLevel, std::string_view message)>;

/// Installs the sink for the whole process; an empty one silences again. Call before threads start.
void set_log_sink(LogSink sink);

/// Hands a message to the sink, if there is one. Threads: safe; calls are serialised.
void log(LogLevel level, std::string_view message);

}  // namespace smartinf::base
