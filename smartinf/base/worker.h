// A thread for what is done behind its caller: items are posted, and worked off in their order.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include "smartinf/base/check.h"

namespace smartinf::base {

/// Threads: post() and idle() from any, those of the worker included. Bound of the queue: the
/// caller's.
template <typename Item>
class Worker {
 public:
  /// work: called with one item after another; with several threads, with several items at once.
  /// name: of the threads, up to 15 characters.
  Worker(const std::string& name, std::function<void(Item)> work, uint32_t threads = 1)
      : queue_(std::make_shared<Queue>(std::move(work))) {
    for (uint32_t i = 0; i < threads; ++i) {
      threads_.emplace_back([queue = queue_] { serve(*queue); });
      (void)pthread_setname_np(threads_.back().native_handle(), name.c_str());
    }
  }
  ~Worker() {
    close();
    join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void post(Item item) {
    {
      const std::lock_guard lock(queue_->mutex);
      SI_CHECK(!queue_->closed, "work for a worker that was closed");
      queue_->items.push_back(std::move(item));
    }
    queue_->changed.notify_one();
  }
  /// No item waits to be begun.
  bool idle() const {
    const std::lock_guard lock(queue_->mutex);
    return queue_->items.empty();
  }
  /// Nothing is posted from here on. The threads end when what was posted is done.
  void close() {
    {
      const std::lock_guard lock(queue_->mutex);
      queue_->closed = true;
    }
    queue_->changed.notify_all();
  }
  /// The same, and what has not begun is forgotten: so many items.
  size_t cancel() {
    size_t forgotten = 0;
    {
      const std::lock_guard lock(queue_->mutex);
      forgotten = queue_->items.size();
      queue_->items.clear();
    }
    close();
    return forgotten;
  }
  /// Waits until the threads have ended; after close().
  void join() { threads_.clear(); }
  /// Threads that do not come back are not waited for. work has to own what it uses.
  void detach() {
    for (std::jthread& thread : threads_) thread.detach();
    threads_.clear();
  }

  std::vector<std::jthread>& threads() { return threads_; }

 private:
  struct Queue {
    explicit Queue(std::function<void(Item)> does) : work(std::move(does)) {}
    const std::function<void(Item)> work;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Item> items;
    bool closed = false;
  };

  static void serve(Queue& queue) {
    std::unique_lock lock(queue.mutex);
    while (true) {
      queue.changed.wait(lock, [&] { return queue.closed || !queue.items.empty(); });
      if (queue.items.empty()) return;
      Item item = std::move(queue.items.front());
      queue.items.pop_front();
      lock.unlock();
      queue.work(std::move(item));
      lock.lock();
    }
  }

  const std::shared_ptr<Queue> queue_;  // with the threads, which may be left behind
  std::vector<std::jthread> threads_;
};

}  // namespace smartinf::base
