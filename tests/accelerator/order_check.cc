// Finds accesses of two streams to the same bytes that no event and no wait of the host orders,
// without any timing: operators compute on the calling thread, so that a stream which overwrites
// what a late operator would still read gives right numbers here and wrong ones on a GPU.
#include <algorithm>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>

#include "tests/accelerator/internal.h"

namespace smartinf::test_accelerator {
namespace {

struct Noted {
  Access access;
  size_t stream;
  uint64_t at;  // the stream's own count
  std::string name;
};

struct State {
  std::mutex mutex;
  std::array<Clock, kStreams> clocks{};
  Clock host{};
  std::vector<Noted> noted;
  uint64_t errors = 0;
  std::string unthrown;  // found where nothing can be thrown: the next operator throws it
};

State& state() {
  static auto* made = new State;
  return *made;
}

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < kStreams; ++i) clock[i] = std::max(clock[i], other[i]);
}

bool overlap(const Access& a, const Access& b) {
  return a.begin != a.end && a.begin < b.end && b.begin < a.end;
}
bool within(const Access& a, const Access& b) { return b.begin <= a.begin && a.end <= b.end; }

// Text about an access that is not ordered before this one of stream `now`; empty: all are ordered.
std::string find_unordered(const State& all, size_t now, const Access& access,
                           const std::string& name) {
  for (const Noted& before : all.noted) {
    if (!overlap(before.access, access) || !(before.access.writes || access.writes)) continue;
    if (before.stream == now || before.at <= all.clocks[now][before.stream]) continue;
    return "test accelerator: no event orders stream " + std::to_string(now) + ", which " +
           (access.writes ? "writes (" : "reads (") + name + "), after stream " +
           std::to_string(before.stream) + ", which " +
           (before.access.writes ? "writes" : "reads") + " the same bytes (" + before.name + ")";
  }
  return "";
}

}  // namespace

void note_accesses(c10::StreamId stream, const std::vector<Access>& accesses,
                   const std::string& name) {
  if (!options().check_order) return;
  State& all = state();
  const auto now = static_cast<size_t>(stream);
  const std::lock_guard lock(all.mutex);
  join(all.clocks[now], all.host);
  const uint64_t at = ++all.clocks[now][now];
  std::string error = std::exchange(all.unthrown, "");
  for (const Access& access : accesses) {
    if (error.empty()) error = find_unordered(all, now, access, name);
  }
  if (!error.empty()) ++all.errors;
  TORCH_CHECK(error.empty(), error);
  for (const Access& access : accesses) {
    // An access that is noted here stands for those that it covers: who is after this is after
    // that.
    std::erase_if(all.noted, [&](const Noted& before) {
      const bool stands_for = access.writes || (!before.access.writes && before.stream == now);
      return stands_for && within(before.access, access);
    });
    all.noted.push_back({access, now, at, name});
  }
}

void note_freed(c10::StreamId stream, uintptr_t begin, uintptr_t end, bool recorded) {
  if (!options().check_order) return;
  State& all = state();
  const auto now = static_cast<size_t>(stream);
  const std::lock_guard lock(all.mutex);
  join(all.clocks[now], all.host);
  const Access access{begin, end, true};
  const std::string found = recorded ? "" : find_unordered(all, now, access, "frees it");
  if (!found.empty()) all.unthrown = found;
  std::erase_if(all.noted, [&](const Noted& before) { return within(before.access, access); });
}

Clock clock_of(c10::StreamId stream) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  Clock& clock = all.clocks[static_cast<size_t>(stream)];
  join(clock, all.host);
  return clock;
}

void stream_knows(c10::StreamId stream, const Clock& clock) {
  const std::lock_guard lock(state().mutex);
  join(state().clocks[static_cast<size_t>(stream)], clock);
}

void host_knows(const Clock& clock) {
  const std::lock_guard lock(state().mutex);
  join(state().host, clock);
}

void reset_order() {
  const std::lock_guard lock(state().mutex);
  state().noted.clear();
  state().errors = 0;
  state().unthrown.clear();
}

extern "C" uint64_t smartinf_test_accelerator_order_errors() {
  const std::lock_guard lock(state().mutex);
  return state().errors + (state().unthrown.empty() ? 0 : 1);
}

}  // namespace smartinf::test_accelerator
