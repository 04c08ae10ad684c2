// Threads that share out the parts of one job, made once and used for job after job: starting
// threads for each job would cost more than many of the jobs.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace smartinf::base {

/// Threads: run() from one thread at a time, and not from within a part.
class ThreadTeam {
 public:
  /// threads: those that work on a job, the caller of run() among them; at least 1. awake: how long
  /// they spin for a job, or for the end of one, before they sleep; for jobs that follow on each
  /// other and are shorter than it takes to wake a thread.
  ThreadTeam(uint32_t threads, std::string name, std::chrono::microseconds awake = {});
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  uint32_t size() const { return static_cast<uint32_t>(others_.size()) + 1; }

  /// Calls part(worker, index) once for each index in [0, parts), each on any of the threads, lower
  /// indices begun first; returns when all have returned. worker is in [0, size()) and belongs to
  /// one thread during the call, so that it can name memory of the thread's own. With one part, or
  /// a team of one, everything runs on the calling thread. A part does not throw.
  void run(size_t parts, const std::function<void(uint32_t worker, size_t index)>& part);

 private:
  void work(uint32_t worker);
  void serve(const std::stop_token& stop, uint32_t worker);
  template <class Done>
  void wait_awake(const Done& done) const;

  const std::chrono::microseconds awake_;

  // Written while no other thread is in a job.
  const std::function<void(uint32_t, size_t)>* part_ = nullptr;
  size_t parts_ = 0;
  std::atomic<size_t> next_{0};

  // How many jobs were begun, whether threads may still enter the last one, and how many other
  // threads are in it: a thread that gets no core is not waited for.
  std::atomic<uint64_t> state_ = 0;

  std::mutex mutex_;
  std::condition_variable_any begun_;
  std::condition_variable done_;
  std::vector<std::jthread> others_;  // last: joined before the rest goes
};

}  // namespace smartinf::base
