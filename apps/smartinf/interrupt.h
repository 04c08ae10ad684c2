// Ctrl-C and SIGTERM: the first asks the work to stop where it may, the second ends the process at
// once.
#pragma once

#include <atomic>
#include <stop_token>
#include <thread>

namespace smartinf::apps {

/// Before exec() of a program that begins with base::end_at_signals(): what comes meanwhile waits
/// for it.
void hold_signals();

/// While it lives, a thread of its own waits for the signals. Made before other threads start: they
/// inherit that the signals are not for them.
class Interrupt {
 public:
  /// `saying` is printed at the first signal.
  explicit Interrupt(
      const char* saying = "stopping at a committed step; press Ctrl-C again to stop at once");
  /// Takes a second signal within two seconds for the same one: whoever starts several ranks passes
  /// on a signal that they may have got themselves.
  void expect_it_twice() { twice_ = true; }
  /// While nothing has begun that could be stopped, the first signal ends the process.
  void end_at_once(bool yes) { at_once_ = yes; }
  /// Before exec(): a signal that came is heeded by now, a later one waits for the next program.
  void end() {
    waiter_.request_stop();
    waiter_.join();
  }
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  std::stop_token token() const { return stop_.get_token(); }
  bool requested() const { return stop_.stop_requested(); }

 private:
  std::stop_source stop_;
  std::atomic<bool> twice_ = false;
  std::atomic<bool> at_once_ = false;
  std::jthread waiter_;
};

}  // namespace smartinf::apps
