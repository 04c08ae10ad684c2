#include "apps/smartinf/live_view.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "smartinf/base/units.h"
#include "smartinf/engine/memory.h"

namespace smartinf::apps {
namespace {

constexpr size_t kRecent = 40;  // steps
constexpr double kDrawSeconds = 0.1;

/// A column for each value, from the lowest to the highest of them.
std::string sparkline(const std::deque<train::StepReport>& recent) {
  constexpr std::array<const char*, 8> kBlocks{"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  double low = INFINITY;
  double high = -INFINITY;
  for (const train::StepReport& report : recent) {
    if (!std::isfinite(report.loss)) continue;
    low = std::min(low, report.loss);
    high = std::max(high, report.loss);
  }
  std::string text;
  for (const train::StepReport& report : recent) {
    const double share = high > low ? (report.loss - low) / (high - low) : 0;
    text += std::isfinite(share) ? kBlocks[static_cast<size_t>(std::lround(7 * share))] : " ";
  }
  return text;
}

size_t terminal_width() {
  winsize size{};
  const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

/// The first `width` characters of UTF-8.
std::string_view cut(std::string_view text, size_t width) {
  size_t end = 0;
  for (; end < text.size(); ++end) {
    const bool begins = (static_cast<unsigned char>(text[end]) & 0xc0) != 0x80;
    if (begins && width-- == 0) break;
  }
  return text.substr(0, end);
}

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

bool shows_unicode() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string_view value = environment(name);
    if (value.empty()) continue;
    return value.find("UTF-8") != value.npos || value.find("utf8") != value.npos;
  }
  return false;
}

}  // namespace

std::string time_left(uint64_t start_ns, uint64_t steps_done, uint64_t steps_left) {
  return base::format_seconds(base::seconds_since(start_ns) / static_cast<double>(steps_done) *
                              static_cast<double>(steps_left)) +
         " left";
}

bool LiveView::possible() { return ::isatty(STDOUT_FILENO) != 0 && environment("TERM") != "dumb"; }

void LiveView::add(const train::StepReport& report) {
  last_ = report;
  last_.phases.clear();
  last_.traffic = {};
  recent_.push_back(last_);
  if (recent_.size() > kRecent) recent_.pop_front();
  if (report.step >= steps_) return clear();
  if (drawn_ns_ == 0 || base::seconds_since(drawn_ns_) >= kDrawSeconds) draw();
}

std::vector<std::string> LiveView::lines(bool unicode) const {
  constexpr uint64_t kWidth = 40;
  const uint64_t full = kWidth * last_.step / steps_;
  double seconds = 0;
  double exposed_s = 0;
  double tokens = 0;
  for (const train::StepReport& report : recent_) {
    seconds += report.seconds;
    exposed_s += report.exposed_s;
    tokens += static_cast<double>(report.tokens);
  }
  seconds = std::max(seconds, 1e-9);
  return {
      fmt::format("[{:#>{}}{:>{}}] step {}/{}, {}%, {}", "", full, "", kWidth - full, last_.step,
                  steps_, 100 * last_.step / steps_,
                  time_left(start_ns_, last_.step - first_, steps_ - last_.step)),
      fmt::format("loss {:.4f} {}{}", last_.loss, unicode ? sparkline(recent_) : "",
                  validation_ ? fmt::format("  validation {:.4f}", *validation_) : ""),
      fmt::format("gradient norm {:.3f}  lr {:.2e}  {:.0f} tokens/s  {} memory  {:.0f}% waiting",
                  last_.gradient_norm, last_.lr, tokens / seconds,
                  base::format_bytes(engine::resident_memory_bytes()), 100 * exposed_s / seconds)};
}

// The cursor stays on the empty line above: what others write begins there, and everything below is
// drawn again.
void LiveView::draw() {
  drawn_ns_ = base::now_ns();
  shown_ = true;
  const size_t width = terminal_width();
  const bool plain = !environment("NO_COLOR").empty();
  std::string text = "\r\x1b[J";
  const std::vector<std::string> all = lines(shows_unicode());
  for (const std::string& line : all) {
    const bool dim = !plain && &line != &all[1];  // all but the loss
    text +=
        fmt::format("\n{}{}{}", dim ? "\x1b[2m" : "", cut(line, width - 1), dim ? "\x1b[0m" : "");
  }
  fmt::print("{}\r\x1b[{}A", text, all.size());
  std::fflush(stdout);
}

void LiveView::print(const std::string& line) {
  fmt::print("{}{}\n", shown_ ? "\r\x1b[J" : "", line);
  if (shown_) return draw();
  std::fflush(stdout);
}

void LiveView::clear() {
  if (shown_) fmt::print("\r\x1b[J");
  shown_ = false;
  std::fflush(stdout);
}

}  // namespace smartinf::apps
