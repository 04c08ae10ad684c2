#include "smartinf/storage/thread_ring.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

namespace smartinf::storage {
namespace {

using base::Result;
using base::Status;

/// First in, first out, linked through IoRequest::next, so that queueing never allocates.
struct RequestList {
  IoRequest* first = nullptr;
  IoRequest* last = nullptr;

  void push(IoRequest* request) {
    request->next = nullptr;
    (first == nullptr ? first : last->next) = request;
    last = request;
  }
  IoRequest* pop() {
    IoRequest* request = first;
    if (request != nullptr) first = std::exchange(request->next, nullptr);
    return request;
  }
};

class ThreadRing final : public Ring {
 public:
  ThreadRing(uint32_t depth, uint32_t threads) : depth_(depth) {
    workers_.reserve(threads);
    for (uint32_t i = 0; i < threads; ++i) {
      workers_.emplace_back([this](const std::stop_token& stop) { work(stop); });
      (void)pthread_setname_np(workers_.back().native_handle(), "smartinf-io");
    }
  }
  ~ThreadRing() override {
    for (std::jthread& worker : workers_) worker.request_stop();
  }
  ThreadRing(const ThreadRing&) = delete;
  ThreadRing& operator=(const ThreadRing&) = delete;

  std::string_view name() const override { return "threads"; }
  uint32_t depth() const override { return depth_; }

  Result<uint32_t> add_file(int descriptor, std::string /*path*/) override {
    const std::lock_guard lock(mutex_);
    files_.push_back(descriptor);
    return static_cast<uint32_t>(files_.size() - 1);
  }
  base::Status register_memory(std::span<std::byte> /*memory*/) override { return base::Status(); }

  Status submit(std::span<IoRequest* const> requests) override {
    if (requests.empty()) return Status();
    const std::lock_guard lock(mutex_);
    SI_CHECK(in_flight_ + requests.size() <= depth_, "more requests than the ring's depth");
    in_flight_ += requests.size();
    for (IoRequest* request : requests) waiting_.push(request);
    if (requests.size() == 1) {
      work_arrived_.notify_one();
    } else {
      work_arrived_.notify_all();
    }
    return Status();
  }

  Result<size_t> reap(std::span<IoRequest*> done, std::chrono::nanoseconds wait) override {
    std::unique_lock lock(mutex_);
    if (done.empty() || in_flight_ == 0) return size_t{0};
    if (finished_.first == nullptr && wait.count() > 0) {
      work_finished_.wait_for(lock, wait, [this] { return finished_.first != nullptr; });
    }
    size_t count = 0;
    while (count < done.size() && finished_.first != nullptr) done[count++] = finished_.pop();
    in_flight_ -= count;
    return count;
  }

 private:
  void work(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (work_arrived_.wait(lock, stop, [this] { return waiting_.first != nullptr; })) {
      IoRequest* request = waiting_.pop();
      const int file = files_[request->file];
      lock.unlock();
      request->outcome = transfer(file, *request);
      lock.lock();
      finished_.push(request);
      work_finished_.notify_one();
    }
  }

  static int64_t transfer(int file, const IoRequest& request) {
    iovec part{request.buffer.data(), request.buffer.size()};
    const auto offset = static_cast<off_t>(request.offset_bytes);
    int64_t outcome = 0;
    switch (request.op) {
      case IoOp::kRead:
        outcome = preadv2(file, &part, 1, offset, 0);
        break;
      case IoOp::kWrite:
        outcome = pwritev2(file, &part, 1, offset, 0);
        break;
      case IoOp::kWriteDurable:
        outcome = pwritev2(file, &part, 1, offset, RWF_DSYNC);
        break;
      case IoOp::kSync:
        outcome = fdatasync(file);
        break;
    }
    return outcome < 0 ? -static_cast<int64_t>(errno) : outcome;
  }

  const uint32_t depth_;
  std::mutex mutex_;  // guards everything below but the workers
  std::condition_variable_any work_arrived_;
  std::condition_variable work_finished_;
  RequestList waiting_;   // bound: depth_
  RequestList finished_;  // bound: depth_
  size_t in_flight_ = 0;
  std::vector<int> files_;
  std::vector<std::jthread> workers_;  // last: joined before the rest goes
};

}  // namespace

std::unique_ptr<Ring> make_thread_ring(uint32_t depth, uint32_t threads) {
  return std::make_unique<ThreadRing>(depth, std::max<uint32_t>(threads, 1));
}

}  // namespace smartinf::storage
