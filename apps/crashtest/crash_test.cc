// Power cuts: every boundary of I/O of a small run, not a sample of them.
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "apps/crashtest/crash_scenario.h"

namespace smartinf::crash {
namespace {

using storage::CutFate;
using ::testing::UnorderedElementsAre;

ScenarioOptions small(CommitFlaw flaw = CommitFlaw::kNone) {
  ScenarioOptions options;
  options.devices = 2;
  options.steps = 4;  // one of each way to abort a step, a resting subgroup, both table places
  options.elements = 1100;
  options.rows = flaw == CommitFlaw::kRowsNoSync ? 40 : 0;
  options.flaw = flaw;
  return options;
}

/// Cuts at every event and with every fate, until something is lost; says what. moments: what the
/// run was doing then. every: of how many events one is cut at.
std::string first_loss_at_any_point(const ScenarioOptions& options, std::set<std::string>& moments,
                                    uint64_t every = 1) {
  Scenario whole(options);
  whole.run();
  for (uint64_t cut = 0; cut <= whole.events(); cut += every) {
    Scenario scenario(options);
    scenario.run(cut);
    moments.insert(std::string(scenario.moment()));
    const auto disks = scenario.disks();
    for (uint32_t fate = 0; fate < storage::kCutFates; ++fate) {
      scenario.set_disks(disks);
      scenario.settle(static_cast<CutFate>(fate), cut * 7 + fate);
      const std::string wrong = scenario.recover_and_judge();
      if (!wrong.empty()) return "event " + std::to_string(cut) + ": " + wrong;
    }
  }
  return {};
}

TEST(Crash, NothingIsLostAtAnyPoint) {
  ScenarioOptions options = small();
  std::set<std::string> moments;
  for (options.seed = 1; options.seed <= 4; ++options.seed) {  // each way to guess in each step
    if (options.seed == 3) options.format = {base::MomentFormat::kQ4, base::MasterFormat::kM24};
    EXPECT_EQ(first_loss_at_any_point(options, moments), "") << "seed " << options.seed;
  }
  EXPECT_THAT(moments, UnorderedElementsAre("creation", "write", "write that is aborted",
                                            "right guess", "rest after a right guess",
                                            "wrong guess", "again after a wrong guess",
                                            "guess that is aborted", "abort", "prepare", "commit"));
}

TEST(Crash, RowsAndBlocksAreOfOneStep) {
  ScenarioOptions options = small();
  options.rows = 40;
  std::set<std::string> moments;
  EXPECT_EQ(first_loss_at_any_point(options, moments, 3), "");
  EXPECT_THAT(moments, ::testing::IsSupersetOf({"rows", "merge of rows"}));
}

TEST(Crash, NothingIsLostWhenRecoveryIsCutToo) {
  ScenarioOptions options = small();
  options.rows = 40;
  Scenario whole(options);
  whole.run();
  for (uint64_t cut = 0; cut <= whole.events(); cut += 11) {
    Scenario scenario(options);
    scenario.run(cut);
    scenario.settle(CutFate::kTorn, cut);
    const auto disks = scenario.disks();
    for (uint64_t again = 0; again < 40; again += 1 + cut % 3) {
      scenario.set_disks(disks);
      scenario.recover_and_cut(again);
      scenario.settle(static_cast<CutFate>(again % storage::kCutFates), again);
      const std::string wrong = scenario.recover_and_judge();
      ASSERT_TRUE(wrong.empty()) << "event " << cut << ", then " << again << ": " << wrong;
    }
  }
}

TEST(Crash, BrokenCommitsAreFound) {
  std::set<std::string> moments;
  EXPECT_NE(first_loss_at_any_point(small(CommitFlaw::kNoSync), moments), "");
  EXPECT_NE(first_loss_at_any_point(small(CommitFlaw::kSuperblockFirst), moments), "");
  EXPECT_NE(first_loss_at_any_point(small(CommitFlaw::kRowsNoSync), moments), "");
}

}  // namespace
}  // namespace smartinf::crash
