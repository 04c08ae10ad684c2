// The processor of a local device: cores of this machine. Jobs are worked through in blocks that
// any thread may take; a block of every plane fits a core's L2, so whatever is done to a block is
// done while it is there.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "smartinf/base/worker.h"
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

  base::Result<std::unique_ptr<SlotMemory>> allocate(uint64_t bytes) override;
  void start(Job& job) override;
  uint32_t threads() const override { return static_cast<uint32_t>(workers_.size()); }

 private:
  /// A job under way, which every thread is given.
  struct Running {
    Running(Job& of, uint64_t all) : job(of), blocks(all), unfinished(all) {}
    Job& job;  // gone when all blocks are finished
    const uint64_t blocks;
    std::atomic<uint64_t> next = 0;  // to be taken
    std::atomic<uint64_t> unfinished;
    std::atomic<bool> failed = false;
  };
  void run(Running& running, uint32_t track);

  std::function<void(Job&)> on_finished_;
  std::shared_ptr<Trace> trace_;
  std::deque<base::Worker<std::shared_ptr<Running>>> workers_;  // one thread each
};

}  // namespace smartinf::csd
