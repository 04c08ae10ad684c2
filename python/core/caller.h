// Runs the core's long calls on a thread of their own, so that the calling Python thread keeps
// answering signals (Ctrl-C) while it waits, with the GIL released.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace smartinf::python {

/// Threads: one call at a time; the core sees one caller after another, never two at once.
class Caller {
 public:
  Caller();
  ~Caller();
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  /// Runs `work` and returns when it is done; rethrows what it threw. The GIL is held on entry and
  /// on return, and not in between. A signal handler that raises while the work runs (Ctrl-C) does
  /// not cut it short, because the work uses the caller's memory and state must stay whole: the
  /// exception is raised when the work is done. Other threads' calls wait their turn; a call by a
  /// signal handler that has interrupted this thread's would wait for ever, and is refused.
  void run(std::function<void()> work);
  /// The same for destructors: signals wait for whoever looks at them next, and what `work` throws
  /// is dropped.
  void run_always(std::function<void()> work);

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> work_;
  std::exception_ptr thrown_;
  enum class Phase { kFree, kRunning, kDone } phase_ = Phase::kFree;
  std::thread::id caller_;  // while kRunning and kDone, of run()
  bool closing_ = false;
  std::jthread thread_;
};

}  // namespace smartinf::python
