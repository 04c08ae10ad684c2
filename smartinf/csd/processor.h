// A device's computing half: threads that work through the blocks of subgroups in slots. A block of
// every plane fits a core's L2, so whatever is done to a block is done while it is there.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/trace.h"

namespace smartinf::csd {

struct Slot;

/// Work on one subgroup, in blocks that any thread may take. Owned by a slot and used again and
/// again; not touched by its owner between Processor::start() and its appearance as finished.
class BlockWork {
 public:
  virtual ~BlockWork() = default;
  virtual base::Status run_block(uint64_t block) = 0;

  /// After it has finished: the first failure, or ok.
  const base::Status& status() const { return status_; }

  Slot* slot = nullptr;  // the one that owns it

 protected:
  /// Shown in a trace.
  const char* trace_name_ = "update";
  uint32_t trace_subgroup_ = 0;

 private:
  friend class Processor;
  uint64_t blocks_ = 0;
  uint64_t next_ = 0;  // under the processor's lock
  std::atomic<uint64_t> unfinished_{0};
  std::atomic<bool> failed_{false};
  base::Status status_;  // written by the thread that set failed_
  BlockWork* behind_ = nullptr;
};

/// Bound: one work per slot. Works are taken oldest first; the blocks of one are shared by all
/// threads.
class Processor {
 public:
  /// on_finished is called on a processor thread. Thread i runs on cores[i % cores.size()]; no
  /// cores: wherever the system puts it.
  Processor(const std::string& name, uint32_t threads, std::span<const uint32_t> cores,
            std::function<void(BlockWork&)> on_finished, Trace* trace);
  /// Finishes what was started.
  ~Processor();

  void start(BlockWork& work, uint64_t blocks);
  uint32_t threads() const { return static_cast<uint32_t>(threads_.size()); }

 private:
  void run(uint32_t track);

  std::function<void(BlockWork&)> on_finished_;
  Trace* trace_;
  std::mutex mutex_;
  std::condition_variable filled_;
  BlockWork* oldest_ = nullptr;
  BlockWork* newest_ = nullptr;
  bool closing_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace smartinf::csd
