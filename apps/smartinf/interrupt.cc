#include "apps/smartinf/interrupt.h"

#include <csignal>
#include <cstdio>
#include <ctime>
#include <string>

#include <pthread.h>
#include <unistd.h>

#include "smartinf/base/clock.h"

#include "apps/smartinf/commands.h"

namespace smartinf::apps {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};

sigset_t signal_set() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : kSignals) sigaddset(&signals, signal);
  return signals;
}

}  // namespace

void hold_signals() {
  const sigset_t signals = signal_set();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

Interrupt::Interrupt(const char* saying) {
  const sigset_t signals = signal_set();
  hold_signals();
  waiter_ = std::jthread(
      [this, signals, text = std::string("\nsmartinf: ") + saying + "\n"](std::stop_token end) {
        pthread_setname_np(pthread_self(), "interrupt");
        const timespec look_up{.tv_sec = 0, .tv_nsec = 100'000'000};  // for the end of the process
        constexpr double kSameSeconds = 2;
        uint64_t first_ns = 0;
        while (!end.stop_requested()) {
          if (sigtimedwait(&signals, nullptr, &look_up) < 0) continue;
          if (at_once_) {
            std::fputs("\nsmartinf: interrupted\n", stderr);
            _exit(kExitInterrupted);
          }
          if (stop_.stop_requested()) {
            if (twice_ && base::seconds_since(first_ns) < kSameSeconds) continue;
            _exit(kExitInterrupted);
          }
          first_ns = base::now_ns();
          std::fputs(text.c_str(), stderr);
          stop_.request_stop();
        }
      });
}

}  // namespace smartinf::apps
