#include "python/core/remarks.h"

#include <mutex>

#include "smartinf/base/log.h"

namespace smartinf::python {
namespace {

struct Remarks {
  std::mutex mutex;
  std::vector<std::pair<std::string, std::string>> collected;
};

/// Never destroyed: devices that outlive the interpreter may still say something.
Remarks& remarks() {
  static auto* instance = new Remarks;
  return *instance;
}

const char* level_name(base::LogLevel level) {
  switch (level) {
    case base::LogLevel::kDebug:
      return "debug";
    case base::LogLevel::kInfo:
      return "info";
    case base::LogLevel::kWarning:
      return "warning";
  }
  return "warning";
}

}  // namespace

void collect_remarks() {
  base::set_log_sink([](base::LogLevel level, std::string_view message) {
    Remarks& all = remarks();
    const std::lock_guard lock(all.mutex);
    if (all.collected.size() < kRemarksMax) {
      all.collected.emplace_back(level_name(level), std::string(message));
    }
  });
}

std::vector<std::pair<std::string, std::string>> take_remarks() {
  Remarks& all = remarks();
  const std::lock_guard lock(all.mutex);
  return std::exchange(all.collected, {});
}

}  // namespace smartinf::python
