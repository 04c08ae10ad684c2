#include "smartinf/base/end_at_signals.h"

#include <array>
#include <csignal>
#include <cstdio>
#include <cstring>

#include <unistd.h>

namespace smartinf::base {
namespace {

constexpr int kExitInterrupted = 130;
std::array<char, 64> text;  // what a signal handler may use: made before

void end_process(int /*signal*/) {
  (void)!::write(STDERR_FILENO, text.data(), std::strlen(text.data()));
  _exit(kExitInterrupted);
}

}  // namespace

void end_at_signals(const char* program) {
  (void)std::snprintf(text.data(), text.size(), "\n%.31s: interrupted\n", program);
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM}) {
    sigaddset(&signals, signal);
    struct sigaction action {};
    // One that is ignored, as that of a job in the background, stays so.
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = end_process;
    (void)::sigaction(signal, &action, nullptr);
  }
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

}  // namespace smartinf::base
