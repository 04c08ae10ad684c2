#include "smartinf/csd/core_pinning.h"

#include <condition_variable>
#include <filesystem>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

namespace smartinf::csd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(CoreShare, NoTwoDevicesShareACoreAndNearOnesGoFirst) {
  // Two drives on two NUMA nodes of four cores.
  const std::vector<uint32_t> near_first = {0, 1, 2, 3, 4, 5, 6, 7};
  const std::vector<uint32_t> near_second = {4, 5, 6, 7, 0, 1, 2, 3};
  CoreShare cores;
  EXPECT_THAT(cores.take(near_first, 2), ElementsAre(0, 1));
  EXPECT_THAT(cores.take(near_second, 3), ElementsAre(4, 5, 6));
  EXPECT_THAT(cores.take(near_first, 2), ElementsAre(2, 3));
  EXPECT_THAT(cores.take(near_first, 2), IsEmpty()) << "one core is left";
  EXPECT_THAT(cores.take(near_first, 1), ElementsAre(7));
  EXPECT_THAT(cores.take({}, 1), IsEmpty());
}

TEST(CoresNear, NamesCoresOfThisProcessAlsoForAPathThatIsStillToBeMade) {
  const std::string here = std::filesystem::temp_directory_path();
  const std::vector<uint32_t> cores = cores_near(here);
  if (cores.empty()) GTEST_SKIP() << "built without hwloc";
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  for (const uint32_t core : cores) EXPECT_TRUE(CPU_ISSET(core, &allowed)) << core;
  EXPECT_EQ(cores_near(here + "/not/made/yet"), cores);
}

TEST(PinThread, KeepsItOnTheCore) {
  const std::vector<uint32_t> cores = cores_near("/");
  if (cores.empty()) GTEST_SKIP() << "built without hwloc";
  std::mutex mutex;
  std::condition_variable changed;
  bool pinned = false;
  cpu_set_t set;
  CPU_ZERO(&set);
  {
    std::jthread thread([&] {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return pinned; });
      sched_getaffinity(0, sizeof(set), &set);
    });
    pin_thread(thread, cores.back());
    const std::lock_guard lock(mutex);
    pinned = true;
    changed.notify_one();
  }
  EXPECT_EQ(CPU_COUNT(&set), 1);
  EXPECT_TRUE(CPU_ISSET(cores.back(), &set));
}

}  // namespace
}  // namespace smartinf::csd
