#include "smartinf/serve/token_bucket.h"

#include <map>
#include <mutex>

#include <fmt/format.h>

#include "smartinf/base/log.h"

namespace smartinf::serve::wire {

void log_rarely(const char* kind, std::string_view line) {
  // A day of a flood is 8,000 lines of each kind.
  struct Lines {
    TokenBucket bucket{100, 0.1};
    uint64_t left_out = 0;
  };
  static std::mutex mutex;
  static std::map<std::string, Lines, std::less<>> all;
  std::string more;
  {
    const std::lock_guard lock(mutex);
    Lines& lines = all[kind];
    if (!lines.bucket.take()) {
      ++lines.left_out;
      return;
    }
    if (lines.left_out > 0) {
      more = fmt::format(" ({} lines of this kind were left out before it)", lines.left_out);
      lines.left_out = 0;
    }
  }
  base::log(base::LogLevel::kWarning, fmt::format("{}{}", line, more));
}

}  // namespace smartinf::serve::wire
