#include "apps/smartinf/progress.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

namespace smartinf::apps {
namespace {

constexpr double kBarSeconds = 0.1;
constexpr double kLineSeconds = 10;
constexpr uint64_t kBarWidth = 40;

}  // namespace

Progress::Progress(std::string doing, std::stop_token stop)
    : doing_(std::move(doing)), stop_(std::move(stop)), terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
  drawn_ = false;
}

base::Status Progress::operator()(uint64_t done, uint64_t total) {
  if (stop_.stop_requested()) {
    return base::Status(base::ErrorCode::kCancelled, doing_ + ": stopped before it was complete");
  }
  if (base::seconds_since(shown_ns_) < (terminal_ ? kBarSeconds : kLineSeconds)) {
    return base::Status();
  }
  shown_ns_ = base::now_ns();
  const uint64_t percent = total == 0 ? 100 : 100 * std::min(done, total) / total;
  if (terminal_) {
    const uint64_t full = kBarWidth * percent / 100;
    fmt::print(stderr, "\r\x1b[K{} [{:#>{}}{:>{}}] {}%", doing_, "", full, "", kBarWidth - full,
               percent);
    std::fflush(stderr);
    drawn_ = true;
  } else {
    fmt::print(stderr, "{}: {}%\n", doing_, percent);
  }
  return base::Status();
}

}  // namespace smartinf::apps
