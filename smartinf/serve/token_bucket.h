// A token bucket: so many at once, and so many a second in the long run. And the log of what
// strangers can cause, which has one of each kind of line.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace smartinf::serve::wire {

/// Threads: one at a time.
class TokenBucket {
 public:
  TokenBucket(double burst, double per_second)
      : burst_(burst), per_second_(per_second), tokens_(burst) {}
  /// False: none is left.
  bool take() {
    if (tokens() < 1) return false;
    tokens_ = tokens() - 1;
    at_ = Clock::now();
    return true;
  }
  void give_back() { ++tokens_; }
  bool full() const { return tokens() >= burst_; }

 private:
  using Clock = std::chrono::steady_clock;
  double tokens() const {
    const std::chrono::duration<double> passed = Clock::now() - at_;
    return std::min(burst_, tokens_ + passed.count() * per_second_);
  }
  double burst_, per_second_, tokens_;
  Clock::time_point at_ = Clock::now();
};

/// A warning in the log, unless there were many of the same kind: the next one then says how many
/// are left out. Kinds are few and fixed. Threads: any.
void log_rarely(const char* kind, std::string_view line);

}  // namespace smartinf::serve::wire
