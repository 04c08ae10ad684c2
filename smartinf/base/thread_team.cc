#include "smartinf/base/thread_team.h"

#include <pthread.h>

#include "smartinf/base/check.h"

namespace smartinf::base {
namespace {

// Parts of ThreadTeam::state_.
constexpr uint64_t kWithin = 0xFFFF;
constexpr uint64_t kOpen = kWithin + 1;
constexpr uint64_t kJob = 2 * kOpen;

}  // namespace

ThreadTeam::ThreadTeam(uint32_t threads, std::string name, std::chrono::microseconds awake)
    : awake_(awake) {
  SI_CHECK(threads > 0, "a team has at least the thread that calls it");
  name.resize(std::min<size_t>(name.size(), 15));  // what the kernel keeps of a thread's name
  for (uint32_t worker = 1; worker < threads; ++worker) {
    others_.emplace_back([this, worker](const std::stop_token& stop) { serve(stop, worker); });
    (void)pthread_setname_np(others_.back().native_handle(), name.c_str());
  }
}

ThreadTeam::~ThreadTeam() {
  for (std::jthread& thread : others_) thread.request_stop();
}

void ThreadTeam::run(size_t parts, const std::function<void(uint32_t, size_t)>& part) {
  if (parts <= 1 || others_.empty()) {
    for (size_t index = 0; index < parts; ++index) part(0, index);
    return;
  }
  const uint64_t before = state_;
  SI_CHECK((before & (kOpen | kWithin)) == 0, "a team does one job at a time");
  part_ = &part;
  parts_ = parts;
  next_ = 0;
  {
    const std::lock_guard lock(mutex_);
    state_ = before + kJob + kOpen;
  }
  begun_.notify_all();
  work(0);
  state_ -= kOpen;
  const auto all_done = [&] { return (state_ & kWithin) == 0; };
  wait_awake(all_done);
  std::unique_lock lock(mutex_);
  done_.wait(lock, all_done);
}

/// Until it is done, or the time is over. The core is not yielded: where other programs want it,
/// too, the kernel would give it back behind their slices, which are longer than most jobs.
template <class Done>
void ThreadTeam::wait_awake(const Done& done) const {
  const auto until = std::chrono::steady_clock::now() + awake_;
  while (!done() && std::chrono::steady_clock::now() < until) {
  }
}

void ThreadTeam::work(uint32_t worker) {
  for (size_t index = next_++; index < parts_; index = next_++) (*part_)(worker, index);
}

void ThreadTeam::serve(const std::stop_token& stop, uint32_t worker) {
  uint64_t seen = 0;
  const auto is_new = [&] { return state_ / kJob != seen; };
  for (;;) {
    wait_awake([&] { return is_new() || stop.stop_requested(); });
    if (std::unique_lock lock(mutex_); !begun_.wait(lock, stop, is_new)) return;
    uint64_t state = state_;
    while ((state & kOpen) != 0 && !state_.compare_exchange_weak(state, state + 1)) {
    }
    seen = state / kJob;
    if ((state & kOpen) == 0) continue;
    work(worker);
    if ((--state_ & (kOpen | kWithin)) != 0) continue;
    const std::lock_guard lock(mutex_);
    done_.notify_one();
  }
}

}  // namespace smartinf::base
