// Facts about the drives below some paths, kept up to date for a process that runs for long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "apps/smartinf/machine.h"

namespace smartinf::apps {

/// Asks on a thread of its own: a drive, or the tool that asks it, may take seconds. Threads: safe.
class DriveWatch {
 public:
  explicit DriveWatch(std::vector<std::string> paths,
                      std::chrono::seconds every = std::chrono::seconds(60));
  /// Facts about the drive of the path with this index, as of the last look; empty before the
  /// first.
  DriveFacts facts(size_t index) const;

 private:
  void run(const std::stop_token& stop);

  const std::vector<std::string> paths_;
  const std::chrono::seconds every_;
  mutable std::mutex mutex_;
  std::condition_variable_any wake_;
  std::vector<DriveFacts> facts_;
  std::jthread thread_;  // the last: it uses all others
};

}  // namespace smartinf::apps
