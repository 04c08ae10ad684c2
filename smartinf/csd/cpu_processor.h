// The processor of a local device: cores of this machine. Jobs are worked through in blocks that
// any thread may take; a block of every plane fits a core's L2, so whatever is done to a block is
// done while it is there.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "smartinf/csd/processor.h"
#include "smartinf/csd/trace.h"

namespace smartinf::csd {

/// So many blocks a job has.
uint64_t blocks_of(const Job& job);
/// Does one of them. Threads: different blocks of a job from several at once.
base::Status run_block(const Job& job, uint64_t block);

struct CpuProcessorOptions {
  std::string name;  // of the device, in a trace
  uint32_t threads = 1;
  /// Thread i runs on cores[i % cores.size()]; empty: wherever the system puts it.
  std::span<const uint32_t> cores;
  std::shared_ptr<Trace> trace;  // null: not recorded
};

/// Jobs are taken oldest first; the blocks of one are shared by all threads.
class CpuProcessor final : public Processor {
 public:
  CpuProcessor(const CpuProcessorOptions& options, std::function<void(Job&)> on_finished);
  ~CpuProcessor() override;

  base::Result<std::unique_ptr<SlotMemory>> allocate(uint64_t bytes) override;
  void start(Job& job) override;
  uint32_t threads() const override { return static_cast<uint32_t>(threads_.size()); }

 private:
  /// A job under way. Under the lock.
  struct Running {
    Job* job = nullptr;
    uint64_t blocks = 0;
    uint64_t next = 0;        // to be taken
    uint64_t unfinished = 0;  // taken or not
  };
  void run(uint32_t track);

  std::function<void(Job&)> on_finished_;
  std::shared_ptr<Trace> trace_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Running*> queue_;                 // with blocks to be taken, oldest first
  std::vector<std::unique_ptr<Running>> all_;  // as many as there were jobs at once
  std::vector<Running*> free_;                 // of them
  bool closing_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace smartinf::csd
