#include "processes.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace software {
namespace {

thread_local Simulation* current_simulation = nullptr;

constexpr size_t kStackBytes = size_t{256} << 10;  // kernels have no large arrays and no recursion

}  // namespace

struct Simulation::Process {
  std::string name;
  std::function<void()> body;
  std::unique_ptr<char[]> stack;
  ucontext_t context;
  const std::string* waits_for = nullptr;
  bool ended = false;
  double now = 0;
};

Simulation::Simulation(const Options& options) : options_(options), random_(options.seed * 2 + 1) {
  current_simulation = this;
}

Simulation::~Simulation() { current_simulation = nullptr; }

Simulation& Simulation::current() {
  if (current_simulation == nullptr) {
    std::fputs("a kernel was called outside of software::Simulation\n", stderr);
    std::abort();
  }
  return *current_simulation;
}

/// Source: Marsaglia 2003, xorshift64*.
uint64_t Simulation::random() {
  random_ ^= random_ >> 12;
  random_ ^= random_ << 25;
  random_ ^= random_ >> 27;
  return random_ * 0x2545f4914f6cdd1dULL;
}

void Simulation::start(const std::string& name, std::function<void()> body) {
  processes_.push_back(std::unique_ptr<Process>(new Process));
  Process& process = *processes_.back();
  process.name = name;
  process.now = self_ != nullptr ? self_->now : 0;
  process.body = std::move(body);
  process.stack.reset(new char[kStackBytes]);
  getcontext(&process.context);
  process.context.uc_stack.ss_sp = process.stack.get();
  process.context.uc_stack.ss_size = kStackBytes;
  process.context.uc_link = nullptr;
  makecontext(&process.context, &Simulation::enter, 0);
  ready_.push_back(&process);
}

void Simulation::enter() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  Simulation& run = current();
  run.self_->body();
  run.self_->ended = true;
  run.cycles_ = std::max(run.cycles_, run.self_->now);
  run.back_to_run();
}

void Simulation::back_to_run() {
  Process* const process = self_;
#if defined(__SANITIZE_ADDRESS__)
  // The stack of main is known again when main is entered.
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(process->ended ? nullptr : &fake, main_.uc_stack.ss_sp,
                                 main_.uc_stack.ss_size);
#endif
  swapcontext(&process->context, &main_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

std::string Simulation::run() {
  while (!ready_.empty() && failure_.empty()) {
    std::swap(ready_[random() % ready_.size()], ready_.back());
    self_ = ready_.back();
    ready_.pop_back();
    self_->waits_for = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, self_->stack.get(), kStackBytes);
#endif
    swapcontext(&main_, &self_->context);
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(fake, &bottom, &size);
#endif
    if (self_->ended) self_->stack.reset();
    self_ = nullptr;
  }
  if (!failure_.empty()) return failure_;
  std::string stuck;
  for (const auto& process : processes_) {
    if (process->ended) continue;
    stuck += process->name + " waits for " +
             (process->waits_for != nullptr ? *process->waits_for : "nothing") + "\n";
  }
  return stuck;
}

void Simulation::wait(const std::string& on) {
  self_->waits_for = &on;
  back_to_run();
}

void Simulation::wake(Process* process) { ready_.push_back(process); }

void Simulation::maybe_stall() {
  if (options_.stall_one_in == 0 || random() % options_.stall_one_in != 0) return;
  wake(self_);
  back_to_run();
}

void Simulation::fail(const std::string& why) {
  failure_ = self_->name + ": " + why;
  back_to_run();
  std::abort();  // a run that has failed is not continued
}

void Simulation::pass(double cycles) { self_->now += cycles; }
double Simulation::now() const { return self_->now; }
void Simulation::advance(double cycles) { self_->now = std::max(self_->now, cycles); }

void Simulation::move_word() {
  if (options_.memory_words_per_cycle <= 0) return;
  // As if it had been busy from the beginning: processes do not come here in the order of their
  // times, so when it was idle is not known.
  words_moved_ += 1;
  advance(words_moved_ / options_.memory_words_per_cycle);
}

void Region::start(const char* call, std::function<void()> body) {
  Simulation& run = Simulation::current();
  owner_ = run.self();
  ++running_;
  run.start(call, [this, body = std::move(body)] {
    body();
    if (--running_ == 0) Simulation::current().wake(owner_);
  });
}

Region::~Region() {
  static const std::string kEnd = "the processes of its region";
  if (running_ > 0) Simulation::current().wait(kEnd);
}

}  // namespace software
