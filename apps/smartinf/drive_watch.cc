#include "apps/smartinf/drive_watch.h"

#include <utility>

#include <pthread.h>

namespace smartinf::apps {

DriveWatch::DriveWatch(std::vector<std::string> paths, std::chrono::seconds every)
    : paths_(std::move(paths)),
      every_(every),
      facts_(paths_.size()),
      thread_([this](const std::stop_token& stop) { run(stop); }) {
  (void)::pthread_setname_np(thread_.native_handle(), "si-drives");
}

DriveFacts DriveWatch::facts(size_t index) const {
  const std::lock_guard hold(mutex_);
  return facts_.at(index);
}

void DriveWatch::run(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    for (size_t i = 0; i < paths_.size() && !stop.stop_requested(); ++i) {
      DriveFacts found = drive_facts(paths_[i]);
      const std::lock_guard hold(mutex_);
      facts_[i] = std::move(found);
    }
    std::unique_lock hold(mutex_);
    wake_.wait_for(hold, stop, every_, [] { return false; });
  }
}

}  // namespace smartinf::apps
