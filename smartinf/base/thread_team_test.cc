#include "smartinf/base/thread_team.h"

#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(ThreadTeam, DoesEveryPartOnce) {
  for (const uint32_t threads : {1u, 2u, 5u}) {
    ThreadTeam team(threads, "test");
    EXPECT_EQ(team.size(), threads);
    for (const size_t parts : {0u, 1u, 2u, 3u, 1000u}) {
      std::vector<std::atomic<int>> done(parts);
      std::atomic<int> strangers = 0;
      team.run(parts, [&](uint32_t worker, size_t index) {
        ++done[index];
        if (worker >= threads) ++strangers;
      });
      for (size_t i = 0; i < parts; ++i) ASSERT_EQ(done[i], 1) << parts << " parts, part " << i;
      EXPECT_EQ(strangers, 0);
    }
  }
}

TEST(ThreadTeam, WorksOnSeveralThreadsAtOnce) {
  ThreadTeam team(3, "test");
  // Each part waits for all three, so the run ends only if they are under way together.
  std::atomic<int> here = 0;
  std::array<std::atomic<int>, 3> by_worker{};
  team.run(3, [&](uint32_t worker, size_t) {
    ++by_worker[worker];
    ++here;
    while (here < 3) std::this_thread::yield();
  });
  for (const auto& count : by_worker) EXPECT_EQ(count, 1);
}

TEST(ThreadTeam, WhatPartsWroteIsSeenByTheCaller) {
  for (const auto awake : {std::chrono::microseconds(0), std::chrono::microseconds(50)}) {
    ThreadTeam team(4, "test", awake);
    std::vector<uint64_t> values(64);
    for (uint64_t round = 1; round <= 1000; ++round) {
      team.run(values.size(), [&](uint32_t, size_t index) { values[index] += index; });
      const uint64_t sum = std::accumulate(values.begin(), values.end(), uint64_t{0});
      ASSERT_EQ(sum, round * 64 * 63 / 2);
    }
  }
}

TEST(ThreadTeam, EndsWithoutAJob) {
  ThreadTeam team(8, "test");  // its threads sleep, or have not even begun
}

}  // namespace
}  // namespace smartinf::base
