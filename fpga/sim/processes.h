// Runs the processes of a dataflow region as they would run on the card: all at once, coupled by
// streams that hold a few elements and make whoever is ahead wait. One thread, a stack for each
// process, and a random order that a seed repeats; so a deadlock is found when it happens, with
// what every process waits for, and never by a timeout.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ucontext.h>

namespace software {

struct Options {
  uint64_t seed = 1;
  /// Number of accesses to a stream of which one stalls its process at random; 0: none does.
  uint32_t stall_one_in = 0;
  /// Depth of every stream; 0: what the kernel says.
  int stream_depth = 0;
  /// Words per cycle of the card's memory, which all ports share; 0: no limit.
  double memory_words_per_cycle = 0;
};

/// One run of processes, until all have ended. Threads: one run at a time on each thread.
class Simulation {
 public:
  explicit Simulation(const Options& options);
  ~Simulation();

  /// Before run(), or from a process.
  void start(const std::string& name, std::function<void()> body);
  /// Runs the processes. Returns what every process waits for when none could go on; empty when all
  /// have ended. Processes that have not ended are given up with all that is on their stacks.
  std::string run();

  /// The run that this thread is in, for streams and regions.
  static Simulation& current();

  // For processes.
  struct Process;
  Process* self() const { return self_; }
  /// Until wake(); `on` says what for, and outlives the wait.
  void wait(const std::string& on);
  void wake(Process* process);
  void maybe_stall();
  const Options& options() const { return options_; }
  /// Ends the run with this report: what hardware could not do.
  [[noreturn]] void fail(const std::string& why);

  // Time, in cycles of the clock, as a pipeline's initiation interval, full and empty streams and
  // the memory make it; how deep a pipeline is, is left out. A process that runs before another
  // also moves its words before, so times are right over many words only.
  void pass(double cycles);                  // of the process
  void move_word();                          // a word from or to memory
  double now() const;                        // of the process
  void advance(double cycles);               // not before that
  double cycles() const { return cycles_; }  // until the last process ended

 private:
  static void enter();
  uint64_t random();
  void back_to_run();

  Options options_;
  uint64_t random_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<Process*> ready_;
  Process* self_ = nullptr;
  ucontext_t main_;
  std::string failure_;
  double cycles_ = 0;
  double words_moved_ = 0;
};

/// A dataflow region of the process that makes it, which waits at the end of its life until all
/// processes of the region have ended.
class Region {
 public:
  ~Region();
  void start(const char* call, std::function<void()> body);

 private:
  int running_ = 0;
  Simulation::Process* owner_ = nullptr;
};

}  // namespace software
