// A processor of another kind than this machine's threads, for the device's contract: jobs are done
// one at a time and from the last block on, in memory that it brings along. For tests.
#pragma once

#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/cpu_processor.h"

namespace smartinf::csd {

class ReverseProcessor final : public Processor {
 public:
  explicit ReverseProcessor(std::function<void(Job&)> on_finished)
      : on_finished_(std::move(on_finished)), thread_([this] { run(); }) {}
  ~ReverseProcessor() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    filled_.notify_all();
  }

  base::Result<std::unique_ptr<SlotMemory>> allocate(uint64_t bytes) override {
    return std::unique_ptr<SlotMemory>(std::make_unique<Memory>(bytes));
  }
  void start(Job& job) override {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(&job);
    }
    filled_.notify_all();
  }
  uint32_t threads() const override { return 1; }

 private:
  class Memory final : public SlotMemory {
   public:
    explicit Memory(uint64_t bytes)
        : size_(base::round_up(bytes, base::kPageBytes)),
          data_(static_cast<std::byte*>(std::aligned_alloc(base::kPageBytes, size_))) {}
    ~Memory() override { std::free(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::span<std::byte> bytes() const override { return {data_, size_}; }

   private:
    uint64_t size_;
    std::byte* data_;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      filled_.wait(lock, [&] { return !jobs_.empty() || closing_; });
      if (jobs_.empty()) return;
      Job& job = *jobs_.back();  // the newest
      jobs_.pop_back();
      lock.unlock();
      job.status = base::Status();
      for (uint64_t block = blocks_of(job); block-- > 0 && job.status.ok();) {
        job.status = run_block(job, block);
      }
      on_finished_(job);
      lock.lock();
    }
  }

  std::function<void(Job&)> on_finished_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::vector<Job*> jobs_;
  bool closing_ = false;
  std::jthread thread_;
};

inline base::Result<std::unique_ptr<Processor>> make_reverse_processor(
    std::function<void(Job&)> on_finished) {
  return std::unique_ptr<Processor>(std::make_unique<ReverseProcessor>(std::move(on_finished)));
}

}  // namespace smartinf::csd
