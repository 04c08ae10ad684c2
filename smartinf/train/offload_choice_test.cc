#include "smartinf/train/offload_choice.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// A step computes for a while, less by computed_s for each entry that is offloaded, and its drives
/// move bytes meanwhile, at the rates of a spool of its own or others.
struct Machine {
  OffloadChoice::Entries entries{
      .count = 100, .in_memory = 0, .bytes = 1'000'000'000, .rates = {.write = 1e9, .read = 2e9}};
  double computing_s = 400;
  double computed_s = 1;                  // of an entry
  double copied_s = 0.1;                  // likewise, where it is offloaded
  uint64_t drive_bytes = 40'000'000'000;  // beside activations, read and written
  double slower = 1;                      // drives than when they were measured

  OffloadChoice::Measured step(uint64_t offloaded) const {
    const auto count = static_cast<double>(offloaded);
    const auto bytes = static_cast<double>(entries.bytes);
    const double moved_s = bytes / entries.rates.write + bytes / entries.rates.read;
    const double stay = std::min(count, static_cast<double>(entries.in_memory));
    const double drives_s = static_cast<double>(drive_bytes) / entries.rates.write +
                            static_cast<double>(drive_bytes) / entries.rates.read +
                            slower * (count - stay) * moved_s;
    const double computes_s = computing_s - count * (computed_s - copied_s);
    return {.seconds = std::max(computes_s, drives_s),
            .forward_s = 100 * computed_s,
            .waited_s = offloaded > 0 ? std::max(0.0, drives_s - computes_s) : 0,
            .read_bytes = drive_bytes,
            .written_bytes = drive_bytes};
  }
};

struct Decision {
  uint64_t offloaded = 0;
  int steps = 0;
  std::string why;
  std::vector<uint64_t> tried;
};

Decision decide(const Machine& machine) {
  OffloadChoice choice(machine.entries);
  Decision decision;
  while (!choice.decided() && decision.steps < 20) {
    if (decision.tried.empty() || decision.tried.back() != choice.offloaded()) {
      decision.tried.push_back(choice.offloaded());
    }
    decision.why = choice.stepped(machine.step(choice.offloaded()));
    ++decision.steps;
  }
  EXPECT_TRUE(choice.decided());
  EXPECT_EQ(choice.stepped(machine.step(choice.offloaded())), "") << "is said once";
  decision.offloaded = choice.offloaded();
  return decision;
}

TEST(OffloadChoice, TakesAllThatTheDrivesCanCarryBesideTheirOtherBytes) {
  const Decision all = decide({});
  EXPECT_EQ(all.offloaded, 100u) << "340 s are left, and all take 150";
  EXPECT_EQ(all.steps, 1 + 2 * OffloadChoice::kSteps);
  EXPECT_THAT(all.why, AllOf(HasSubstr("100 of 100 units and micro batches are offloaded"),
                             HasSubstr("computed again")));
  Machine busy;
  busy.drive_bytes = 200'000'000'000;  // 300 s
  const Decision some = decide(busy);
  EXPECT_EQ(some.offloaded, 40u)
      << "one costs 1.5 s, and makes the step 1 s shorter: 100 s are left";
  EXPECT_LT(busy.step(some.offloaded).seconds, busy.step(0).seconds);
}

TEST(OffloadChoice, WhereTheDrivesHaveNoTimeEverythingIsComputedAgain) {
  Machine machine;
  machine.drive_bytes = 280'000'000'000;  // 420 s: more than computing
  const Decision none = decide(machine);
  EXPECT_EQ(none.offloaded, 0u);
  EXPECT_EQ(none.tried, (std::vector<uint64_t>{0})) << "nothing is tried";
  EXPECT_THAT(none.why, HasSubstr("no time"));
  machine.entries.in_memory = 30;
  EXPECT_EQ(decide(machine).tried, (std::vector<uint64_t>{0, 30})) << "what no drive need take";
}

TEST(OffloadChoice, DrivesThatAreSlowerThanTheyWereMeasuredGetLess) {
  Machine machine;
  machine.slower = 4;
  const Decision less = decide(machine);
  EXPECT_EQ(less.tried.size(), 3u);
  EXPECT_EQ(less.offloaded, 48u) << "one costs 6 s, as the step with all of them shows";
  EXPECT_LT(machine.step(less.offloaded).seconds, machine.step(0).seconds);
}

TEST(OffloadChoice, WhatIsNoFasterIsNotKept) {
  Machine machine;
  machine.copied_s = 1;  // as long as computing takes
  const Decision none = decide(machine);
  EXPECT_EQ(none.offloaded, 0u);
  EXPECT_GT(none.tried.size(), 1u);
  EXPECT_THAT(none.why, AllOf(HasSubstr("0 of 100"), HasSubstr("with 100 offloaded")));
  machine.copied_s = 0.95;
  EXPECT_EQ(decide(machine).offloaded, 0u) << "drives wear for it";
}

TEST(OffloadChoice, OffloadedAreAsManyAsSaidTheLastAndOthersEvenly) {
  for (const uint64_t in_memory : {0, 5, 24}) {
    for (uint64_t offloaded = 0; offloaded <= 30; ++offloaded) {
      std::vector<bool> chosen;
      for (uint64_t entry = 0; entry < 24; ++entry) {
        chosen.push_back(is_offloaded(entry, offloaded, in_memory, 24));
      }
      const uint64_t wanted = std::min<uint64_t>(offloaded, 24);
      EXPECT_EQ(static_cast<uint64_t>(std::ranges::count(chosen, true)), wanted);
      const uint64_t last = std::min(in_memory, wanted);
      EXPECT_TRUE(std::all_of(chosen.end() - static_cast<ptrdiff_t>(last), chosen.end(),
                              [](bool one) { return one; }));
      const auto half = chosen.begin() + static_cast<ptrdiff_t>((24 - last) / 2);
      EXPECT_NEAR(static_cast<double>(std::count(chosen.begin(), half, true)),
                  static_cast<double>(wanted - last) / 2, 1);
    }
  }
}

}  // namespace
}  // namespace smartinf::train
