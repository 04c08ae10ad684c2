#include "smartinf/csd/processor.h"

#include <utility>

#include <pthread.h>

#include "smartinf/base/clock.h"
#include "smartinf/csd/core_pinning.h"

namespace smartinf::csd {

Processor::Processor(const std::string& name, uint32_t threads, std::span<const uint32_t> cores,
                     std::function<void(BlockWork&)> on_finished, Trace* trace)
    : on_finished_(std::move(on_finished)), trace_(trace) {
  for (uint32_t i = 0; i < threads; ++i) {
    uint32_t track = 0;
    if (trace_ != nullptr) track = trace_->add_track({name, "processor " + std::to_string(i)});
    threads_.emplace_back([this, track] { run(track); });
    pthread_setname_np(threads_.back().native_handle(), "si-processor");
    if (!cores.empty()) pin_thread(threads_.back(), cores[i % cores.size()]);
  }
}

Processor::~Processor() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  filled_.notify_all();
}

void Processor::start(BlockWork& work, uint64_t blocks) {
  SI_CHECK(blocks > 0, "a subgroup has at least one block");
  work.blocks_ = blocks;
  work.next_ = 0;
  work.unfinished_.store(blocks, std::memory_order_relaxed);
  work.failed_.store(false, std::memory_order_relaxed);
  work.status_ = base::Status();
  work.behind_ = nullptr;
  {
    const std::lock_guard lock(mutex_);
    (newest_ != nullptr ? newest_->behind_ : oldest_) = &work;
    newest_ = &work;
  }
  filled_.notify_all();
}

void Processor::run(uint32_t track) {
  std::unique_lock lock(mutex_);
  while (true) {
    filled_.wait(lock, [&] { return oldest_ != nullptr || closing_; });
    if (oldest_ == nullptr) return;
    BlockWork& work = *oldest_;
    // A block is taken under the lock, so that a work that leaves the queue has no late visitor.
    const uint64_t block = work.next_++;
    if (block + 1 == work.blocks_) {
      oldest_ = work.behind_;
      if (oldest_ == nullptr) newest_ = nullptr;
    }
    lock.unlock();
    const uint64_t begin_ns = trace_ != nullptr ? base::now_ns() : 0;
    if (!work.failed_.load(std::memory_order_relaxed)) {
      base::Status status = work.run_block(block);
      if (!status.ok() && !work.failed_.exchange(true)) work.status_ = std::move(status);
    }
    if (trace_ != nullptr) {
      trace_->record({work.trace_name_, track, work.trace_subgroup_, begin_ns, base::now_ns()});
    }
    // The last one out sees what the others wrote, the status among it.
    if (work.unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) on_finished_(work);
    lock.lock();
  }
}

}  // namespace smartinf::csd
