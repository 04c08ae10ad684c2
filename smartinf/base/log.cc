#include "smartinf/base/log.h"

#include <mutex>
#include <utility>

namespace smartinf::base {
namespace {

struct SinkHolder {
  std::mutex mutex;
  LogSink sink;
};

SinkHolder& holder() {
  static SinkHolder instance;  // one of the two globals that docs/architecture.md allows
  return instance;
}

}  // namespace

void set_log_sink(LogSink sink) {
  const std::lock_guard lock(holder().mutex);
  holder().sink = std::move(sink);
}

void log(LogLevel level, std::string_view message) {
  const std::lock_guard lock(holder().mutex);
  if (holder().sink) holder().sink(level, message);
}

}  // namespace smartinf::base
