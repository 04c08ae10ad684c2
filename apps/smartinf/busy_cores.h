// Cores that compute while something else is measured: how much of their time that takes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "smartinf/base/clock.h"
#include "smartinf/base/thread_team.h"

namespace smartinf::apps {

/// Keeps all cores computing until it is destroyed. They wait for each other after each part of
/// less than a millisecond, as in a model's operators. Threads: one caller.
class BusyCores {
 public:
  explicit BusyCores(uint32_t cores)
      : thread_([this, cores](const std::stop_token& stop) {
          base::ThreadTeam team(cores, "si-compute");
          std::vector<uint64_t> sums(cores);
          while (!stop.stop_requested()) {
            team.run(cores, [&](uint32_t, size_t part) {
              uint64_t sum = sums[part];
              for (int i = 0; i < kMultiplications; ++i) sum = sum * 6364136223846793005u + 1;
              sums[part] = sum;
            });
            ++parts_;
          }
          sum_ = sums.front();  // so that it is computed
        }) {
    const uint64_t alone_ns = base::now_ns();
    std::this_thread::sleep_for(kAlone);
    alone_ = static_cast<double>(parts_) / base::seconds_since(alone_ns);
  }

  /// What is measured begins.
  void begin() {
    begin_ns_ = base::now_ns();
    before_ = parts_;
  }
  /// Bytes a second that would take all time of all cores: those moved since begin(), over the
  /// share by which the cores have computed less. 0: they have computed as much.
  double rate(double bytes) const {
    const double seconds = base::seconds_since(begin_ns_);
    const double lost = 1 - static_cast<double>(parts_ - before_) / seconds / alone_;
    return lost < kSeen ? 0 : bytes / seconds / lost;
  }

 private:
  static constexpr int kMultiplications = 500'000;
  static constexpr std::chrono::milliseconds kAlone{1500};
  static constexpr double kSeen = 0.02;
  double alone_ = 0;  // parts a second
  uint64_t begin_ns_ = 0;
  uint64_t before_ = 0;
  std::atomic<uint64_t> parts_{0}, sum_{0};
  std::jthread thread_;  // the last: it uses all others
};

}  // namespace smartinf::apps
