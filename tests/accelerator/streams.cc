// Streams and events that run late: each stream is a thread with a queue.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "tests/accelerator/internal.h"

namespace smartinf::test_accelerator {

using Time = std::chrono::steady_clock::time_point;

// Recorded anew, an event stands for its last record; who waits for an earlier one is let go by it.
struct Event {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0;
    uint64_t reached = 0;
    Clock clock{};  // of the last record
    Time at;        // of the last that was reached
  };
  std::shared_ptr<State> state = std::make_shared<State>();  // queues may outlive the event
};

namespace {

class Queue {
 public:
  void push(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    if (pushed_++ == 0) std::thread([this] { run(); }).detach();
    waiting_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return done_ == pushed_;
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, last = pushed_] { return done_ >= last; });
  }

 private:
  [[noreturn]] void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work();
      work = nullptr;  // what it held is given back before it counts as done
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
};

Queue& queue(c10::StreamId stream) {
  static auto* queues = new std::array<Queue, kStreams>;  // never destroyed: threads use them
  return queues->at(static_cast<size_t>(stream));
}

// One direction of the host's link: copies of all streams follow one another on it.
class Link {
 public:
  void carry(size_t bytes) {
    const uint64_t rate = options().link_bytes_per_s;
    if (rate == 0) return;
    const std::chrono::duration<double> needed(static_cast<double>(bytes) /
                                               static_cast<double>(rate));
    std::unique_lock lock(mutex_);
    free_at_ = std::max(free_at_, std::chrono::steady_clock::now()) +
               std::chrono::duration_cast<Time::duration>(needed);
    const Time end = free_at_;
    lock.unlock();
    std::this_thread::sleep_until(end);
  }

 private:
  std::mutex mutex_;
  Time free_at_{};
};

Link& link(bool to_device) {
  static auto* links = new std::array<Link, 2>;
  return (*links)[to_device ? 1 : 0];
}

class Gate {
 public:
  void hold(bool hold) {
    const std::lock_guard lock(mutex_);
    held_ = hold;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !held_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
};

Gate& gate() {
  static auto* made = new Gate;
  return *made;
}

thread_local c10::StreamId current = 0;

}  // namespace

c10::StreamId current_stream() { return current; }
c10::StreamId exchange_stream(c10::StreamId stream) { return std::exchange(current, stream); }

c10::StreamId next_stream() {
  static std::atomic<uint32_t> given = 0;
  return 1 + given++ % (kStreams - 1);
}

void enqueue(c10::StreamId stream, std::function<void()> work) {
  queue(stream).push(std::move(work));
}

void enqueue_copy(c10::StreamId stream, bool to_device, size_t bytes, std::function<void()> work) {
  const Time earliest =
      std::chrono::steady_clock::now() + std::chrono::microseconds(options().delay_us);
  enqueue(stream, [=, work = std::move(work)] {
    gate().pass();
    std::this_thread::sleep_until(earliest);
    link(to_device).carry(bytes);
    work();
  });
}

bool idle(c10::StreamId stream) { return queue(stream).idle(); }
void drain(c10::StreamId stream) { queue(stream).drain(); }

void host_waits_for(c10::StreamId stream) {
  const Clock clock = clock_of(stream);
  drain(stream);
  host_knows(clock);
}

void host_waits_for_all() {
  for (size_t i = 0; i < kStreams; ++i) host_waits_for(static_cast<c10::StreamId>(i));
}

void record(Event** event, c10::StreamId stream) {
  if (*event == nullptr) *event = new Event;
  const auto state = (*event)->state;
  uint64_t version = 0;
  {
    const std::lock_guard lock(state->mutex);
    version = ++state->recorded;
    state->clock = clock_of(stream);
  }
  enqueue(stream, [state, version] {
    const std::lock_guard lock(state->mutex);
    state->reached = std::max(state->reached, version);
    state->at = std::chrono::steady_clock::now();
    state->changed.notify_all();
  });
}

void block(Event* event, c10::StreamId stream) {
  if (event == nullptr) return;
  const auto state = event->state;
  std::unique_lock lock(state->mutex);
  stream_knows(stream, state->clock);
  const uint64_t version = state->recorded;
  lock.unlock();
  enqueue(stream, [state, version] {
    std::unique_lock waiting(state->mutex);
    state->changed.wait(waiting, [&] { return state->reached >= version; });
  });
}

bool reached(Event* event) {
  if (event == nullptr) return true;
  const std::lock_guard lock(event->state->mutex);
  const bool all = event->state->reached == event->state->recorded;
  if (all) host_knows(event->state->clock);
  return all;
}

void host_waits_for(Event* event) {
  if (event == nullptr) return;
  std::unique_lock lock(event->state->mutex);
  const uint64_t version = event->state->recorded;
  const Clock clock = event->state->clock;
  event->state->changed.wait(lock, [&] { return event->state->reached >= version; });
  host_knows(clock);
}

double milliseconds_between(Event* first, Event* second) {
  host_waits_for(first);
  host_waits_for(second);
  return std::chrono::duration<double, std::milli>(second->state->at - first->state->at).count();
}

void destroy(Event* event) { delete event; }

extern "C" void smartinf_test_accelerator_hold_copies(bool hold) { gate().hold(hold); }

}  // namespace smartinf::test_accelerator
