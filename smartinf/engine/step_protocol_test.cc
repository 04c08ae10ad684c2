#include "smartinf/engine/step_protocol.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Status;
using Phase = StepProtocol::Phase;
using Next = StepProtocol::Next;

constexpr size_t kDevices = 3;

Status failure(const char* what) { return Status(ErrorCode::kIo, what); }

StepProtocol written() { return StepProtocol({kDevices, true, 7}); }

void update(StepProtocol& protocol) {
  ASSERT_TRUE(protocol.begin_step().ok());
  ASSERT_TRUE(protocol.finish_gradients().ok());
  ASSERT_TRUE(protocol.start_update(kDevices).ok());
}

/// Every device answers; `failing` of them with an error. Returns what comes next.
Next answer_all(StepProtocol& protocol, size_t failing = 0) {
  Next next = Next::kWait;
  for (size_t d = 0; d < kDevices; ++d) {
    EXPECT_EQ(next, Next::kWait) << "before every device has answered";
    next = protocol.answered(d < failing ? failure("answer") : Status());
  }
  return next;
}

Next updates_end(StepProtocol& protocol, size_t failing = 0) {
  Next next = Next::kWait;
  for (size_t d = 0; d < kDevices; ++d) {
    EXPECT_EQ(next, Next::kWait);
    next = protocol.update_ended(d < failing ? failure("update") : Status());
  }
  return next;
}

TEST(StepProtocol, AStepIsPreparedWhenItsEarlyUpdateHasEndedToo) {
  StepProtocol protocol = written();
  EXPECT_EQ(protocol.start_early_update(kDevices).code(), ErrorCode::kFailedPrecondition);
  ASSERT_TRUE(protocol.begin_step().ok());
  ASSERT_TRUE(protocol.start_early_update(kDevices).ok());
  EXPECT_EQ(protocol.start_early_update(kDevices).code(), ErrorCode::kFailedPrecondition);
  ASSERT_TRUE(protocol.finish_gradients().ok());
  EXPECT_EQ(protocol.start_early_update(kDevices).code(), ErrorCode::kFailedPrecondition);
  ASSERT_TRUE(protocol.start_update(kDevices).ok());
  EXPECT_EQ(protocol.start_commit(false).value(), Next::kWait);
  EXPECT_EQ(updates_end(protocol), Next::kWait) << "the other updates go on";
  EXPECT_EQ(updates_end(protocol), Next::kPrepare);
}

TEST(StepProtocol, AFailedEarlyUpdateAbortsTheStep) {
  StepProtocol protocol = written();
  ASSERT_TRUE(protocol.begin_step().ok());
  ASSERT_TRUE(protocol.start_early_update(kDevices).ok());
  EXPECT_EQ(updates_end(protocol, 1), Next::kWait);
  ASSERT_TRUE(protocol.finish_gradients().ok());
  ASSERT_TRUE(protocol.start_update(kDevices).ok());
  EXPECT_EQ(protocol.start_commit(false).value(), Next::kWait);
  EXPECT_EQ(updates_end(protocol), Next::kAbort);
  EXPECT_EQ(answer_all(protocol), Next::kWait);
  EXPECT_EQ(protocol.take_outcome().what(), "update");
}

TEST(StepProtocol, AbortWaitsForAnEarlyUpdate) {
  StepProtocol protocol = written();
  ASSERT_TRUE(protocol.begin_step().ok());
  ASSERT_TRUE(protocol.start_early_update(kDevices).ok());
  EXPECT_EQ(protocol.abort().value(), Next::kAbort);
  EXPECT_EQ(updates_end(protocol, kDevices), Next::kWait);
  EXPECT_EQ(answer_all(protocol), Next::kWait);
  EXPECT_EQ(protocol.phase(), Phase::kIdle);
  EXPECT_TRUE(protocol.take_outcome().ok()) << "what is aborted may fail";
}

TEST(StepProtocol, AStepIsPreparedAndThenCommittedOnAllDevices) {
  StepProtocol protocol = written();
  update(protocol);
  EXPECT_EQ(protocol.step(), 8u);
  EXPECT_EQ(protocol.start_commit(false).value(), Next::kWait) << "devices still update";
  EXPECT_TRUE(protocol.committing());
  EXPECT_EQ(updates_end(protocol), Next::kPrepare);
  EXPECT_EQ(answer_all(protocol), Next::kCommit);
  EXPECT_EQ(protocol.committed_step(), 7u) << "not before all have committed";
  EXPECT_EQ(answer_all(protocol), Next::kCommitted);
  EXPECT_EQ(protocol.committed_step(), 8u);
  EXPECT_FALSE(protocol.committing());
  EXPECT_EQ(protocol.phase(), Phase::kIdle);
  EXPECT_TRUE(protocol.take_outcome().ok());
}

TEST(StepProtocol, UpdatesThatEndedBeforeTheCommitAreNotWaitedFor) {
  StepProtocol protocol = written();
  update(protocol);
  EXPECT_EQ(updates_end(protocol), Next::kWait);
  EXPECT_EQ(protocol.start_commit(true).value(), Next::kWriteResidual);
  EXPECT_EQ(answer_all(protocol), Next::kPrepare);
}

TEST(StepProtocol, AFailureUpToThePreparingAbortsOnAllDevices) {
  const std::map<std::string, std::function<Next(StepProtocol&)>> failures = {
      {"update", [](StepProtocol& p) { return updates_end(p, 1); }},
      {"weights",
       [](StepProtocol& p) {
         p.failed(failure("weights"));
         return updates_end(p);
       }},
      {"residual",
       [](StepProtocol& p) {
         EXPECT_EQ(updates_end(p), Next::kWriteResidual);
         return answer_all(p, 1);
       }},
      {"prepare",
       [](StepProtocol& p) {
         EXPECT_EQ(updates_end(p), Next::kWriteResidual);
         EXPECT_EQ(answer_all(p), Next::kPrepare);
         return answer_all(p, 2);
       }},
  };
  for (const auto& [where, fail] : failures) {
    for (const bool abort_fails : {false, true}) {
      SCOPED_TRACE(where);
      StepProtocol protocol = written();
      update(protocol);
      ASSERT_EQ(protocol.start_commit(true).value(), Next::kWait);
      EXPECT_EQ(fail(protocol), Next::kAbort);
      EXPECT_TRUE(protocol.committing()) << "until all have aborted";
      const Status first = protocol.error();
      EXPECT_FALSE(first.ok());
      EXPECT_EQ(answer_all(protocol, abort_fails ? 1 : 0), Next::kWait);
      EXPECT_FALSE(protocol.committing());
      EXPECT_EQ(protocol.take_outcome().what(), first.what()) << "what led to the abort";
      EXPECT_TRUE(protocol.take_outcome().ok()) << "told once";
      EXPECT_EQ(protocol.phase(), abort_fails ? Phase::kBroken : Phase::kIdle);
      EXPECT_EQ(protocol.committed_step(), 7u);
      EXPECT_EQ(protocol.begin_step().ok(), !abort_fails);
    }
  }
}

TEST(StepProtocol, WhatFailsToCommitIsKnownOnlyAfterOpeningAgain) {
  StepProtocol protocol = written();
  update(protocol);
  ASSERT_EQ(protocol.start_commit(false).value(), Next::kWait);
  ASSERT_EQ(updates_end(protocol), Next::kPrepare);
  ASSERT_EQ(answer_all(protocol), Next::kCommit);
  EXPECT_EQ(answer_all(protocol, 1), Next::kWait);
  EXPECT_EQ(protocol.phase(), Phase::kBroken);
  EXPECT_FALSE(protocol.take_outcome().ok());
  EXPECT_EQ(protocol.committed_step(), 7u);
  EXPECT_THAT(protocol.begin_step().to_string(), testing::HasSubstr("Open the updater again"));
  EXPECT_FALSE(protocol.abort().ok());
}

/// One rank of several, whose devices have all been told to commit or to abort.
struct Agreeing {
  explicit Agreeing(bool written = true) : protocol({kDevices, written, 7, true}) {}
  /// Up to the question whether all have prepared.
  void prepare(size_t failing) {
    update(protocol);
    ASSERT_EQ(protocol.start_commit(false).value(), Next::kWait);
    ASSERT_EQ(updates_end(protocol), Next::kPrepare);
    EXPECT_EQ(answer_all(protocol, failing), Next::kAgree);
    EXPECT_EQ(protocol.error().ok(), failing == 0);
    EXPECT_TRUE(protocol.committing());
  }
  StepProtocol protocol;
};

TEST(StepProtocol, RanksCommitWhenAllHavePreparedAndGoOnWhenAllHaveCommitted) {
  Agreeing rank;
  rank.prepare(0);
  EXPECT_EQ(rank.protocol.agreed(Status(), true), Next::kCommit);
  EXPECT_EQ(answer_all(rank.protocol), Next::kAgree);
  EXPECT_EQ(rank.protocol.committed_step(), 7u) << "before all have committed";
  EXPECT_EQ(rank.protocol.agreed(Status(), true), Next::kCommitted);
  EXPECT_EQ(rank.protocol.committed_step(), 8u);
  EXPECT_EQ(rank.protocol.phase(), Phase::kIdle);
}

TEST(StepProtocol, RanksAbortWhenOneOfThemCouldNotPrepare) {
  for (const size_t failing : {0, 1}) {
    Agreeing rank;
    rank.prepare(failing);
    EXPECT_EQ(rank.protocol.agreed(failure("rank 1"), true), Next::kAbort);
    EXPECT_EQ(answer_all(rank.protocol), Next::kWait);
    EXPECT_EQ(rank.protocol.take_outcome().what(), "rank 1");
    EXPECT_EQ(rank.protocol.phase(), Phase::kIdle);
    EXPECT_EQ(rank.protocol.committed_step(), 7u);
  }
}

TEST(StepProtocol, ARankThatHearsNothingNeitherCommitsNorAborts) {
  for (const bool prepared : {true, false}) {
    Agreeing rank;
    rank.prepare(prepared ? 0 : 1);
    EXPECT_EQ(rank.protocol.agreed(failure("rank 1 has died"), false), Next::kWait);
    EXPECT_EQ(rank.protocol.phase(), Phase::kBroken);
    EXPECT_FALSE(rank.protocol.take_outcome().ok());
    EXPECT_THAT(rank.protocol.abort().status().to_string(), testing::HasSubstr("rank 1 has died"));
  }
  for (const bool heard : {true, false}) {
    Agreeing rank;
    rank.prepare(0);
    ASSERT_EQ(rank.protocol.agreed(Status(), true), Next::kCommit);
    ASSERT_EQ(answer_all(rank.protocol), Next::kAgree);
    EXPECT_EQ(rank.protocol.agreed(failure("rank 1"), heard), Next::kWait);
    EXPECT_EQ(rank.protocol.phase(), Phase::kBroken) << "a commit elsewhere failed";
  }
}

TEST(StepProtocol, RanksHearOfAnUpdateThatFailedAndOfAnEdit) {
  Agreeing rank;
  update(rank.protocol);
  ASSERT_EQ(rank.protocol.start_commit(false).value(), Next::kWait);
  EXPECT_EQ(updates_end(rank.protocol, 1), Next::kAgree);
  EXPECT_EQ(rank.protocol.error().what(), "update");
  EXPECT_EQ(rank.protocol.agreed(failure("rank 0: update"), true), Next::kAbort);
  EXPECT_EQ(answer_all(rank.protocol), Next::kWait);
  (void)rank.protocol.take_outcome();
  ASSERT_TRUE(rank.protocol.begin_edit().ok());
  EXPECT_EQ(rank.protocol.start_commit(false, failure("write")).value(), Next::kAgree);

  Agreeing fresh(/*written=*/false);
  ASSERT_TRUE(fresh.protocol.begin_edit().ok());
  EXPECT_EQ(fresh.protocol.start_commit(false).value(), Next::kPrepare);
  EXPECT_EQ(answer_all(fresh.protocol), Next::kAgree);
  EXPECT_EQ(fresh.protocol.agreed(failure("rank 1"), true), Next::kWait);
  EXPECT_EQ(fresh.protocol.phase(), Phase::kUnwritten);
}

TEST(StepProtocol, AnAbortWaitsForUpdatesAndTakesNoErrorOfTheirs) {
  for (const bool updates_first : {true, false}) {
    StepProtocol protocol = written();
    update(protocol);
    protocol.failed(failure("weights"));
    EXPECT_EQ(protocol.abort().value(), Next::kAbort);
    for (const bool updates : {updates_first, !updates_first}) {
      EXPECT_TRUE(protocol.committing());
      EXPECT_EQ(updates ? updates_end(protocol, kDevices) : answer_all(protocol), Next::kWait);
      protocol.failed(failure("late weights"));
    }
    EXPECT_FALSE(protocol.committing());
    EXPECT_TRUE(protocol.take_outcome().ok());
    EXPECT_EQ(protocol.phase(), Phase::kIdle);
  }
}

TEST(StepProtocol, AnAbortThatFailsIsToldOf) {
  StepProtocol protocol = written();
  ASSERT_TRUE(protocol.begin_step().ok());
  EXPECT_EQ(protocol.abort().value(), Next::kAbort);
  EXPECT_EQ(answer_all(protocol, 1), Next::kWait);
  EXPECT_FALSE(protocol.take_outcome().ok());
  EXPECT_EQ(protocol.phase(), Phase::kBroken);
}

TEST(StepProtocol, NothingIsAbortedBetweenSteps) {
  StepProtocol protocol = written();
  EXPECT_EQ(protocol.abort().value(), Next::kWait);
  EXPECT_FALSE(protocol.committing());
  StepProtocol fresh({kDevices, false, 0});
  EXPECT_EQ(fresh.abort().value(), Next::kWait);
}

TEST(StepProtocol, Step0IsCommittedAtOnceAndNeverAborted) {
  StepProtocol protocol({kDevices, false, 0});
  EXPECT_THAT(protocol.begin_step().to_string(), testing::HasSubstr("initialize()"));
  // One attempt whose writes fail, one that is not prepared, one that succeeds.
  ASSERT_TRUE(protocol.begin_edit().ok());
  EXPECT_EQ(protocol.start_commit(false, failure("write")).value(), Next::kWait);
  EXPECT_FALSE(protocol.take_outcome().ok());
  EXPECT_EQ(protocol.phase(), Phase::kUnwritten);
  ASSERT_TRUE(protocol.begin_edit().ok());
  EXPECT_EQ(protocol.start_commit(false).value(), Next::kPrepare);
  EXPECT_EQ(answer_all(protocol, 1), Next::kWait);
  EXPECT_FALSE(protocol.take_outcome().ok());
  EXPECT_EQ(protocol.phase(), Phase::kUnwritten);
  ASSERT_TRUE(protocol.begin_edit().ok());
  EXPECT_EQ(protocol.step(), 0u);
  EXPECT_EQ(protocol.start_commit(false).value(), Next::kPrepare);
  EXPECT_EQ(answer_all(protocol), Next::kCommit);
  EXPECT_EQ(answer_all(protocol), Next::kCommitted);
  EXPECT_EQ(protocol.committed_step(), 0u);
  EXPECT_EQ(protocol.step(), 1u);
}

TEST(StepProtocol, AnEditThatCouldNotBeWrittenIsAborted) {
  StepProtocol protocol = written();
  ASSERT_TRUE(protocol.begin_edit().ok());
  EXPECT_EQ(protocol.start_commit(true, failure("write")).value(), Next::kAbort);
  EXPECT_EQ(answer_all(protocol), Next::kWait);
  EXPECT_EQ(protocol.take_outcome().what(), failure("write").what());
  EXPECT_EQ(protocol.phase(), Phase::kIdle);
}

// Every call in every phase: allowed where it stands here, and refused without a trace elsewhere.
TEST(StepProtocol, CallsOutOfOrderAreRefused) {
  using Calls = std::map<std::string, std::function<Status(StepProtocol&)>>;
  const Calls calls = {
      {"begin", [](StepProtocol& p) { return p.begin_step(); }},
      {"finish", [](StepProtocol& p) { return p.finish_gradients(); }},
      {"update", [](StepProtocol& p) { return p.start_update(kDevices); }},
      {"edit", [](StepProtocol& p) { return p.begin_edit(); }},
      {"commit", [](StepProtocol& p) { return p.start_commit(false).status(); }},
  };
  struct Case {
    std::function<void(StepProtocol&)> reach;
    std::vector<std::string> allowed;
  };
  const std::map<std::string, Case> phases = {
      {"idle", {[](StepProtocol&) {}, {"begin", "edit"}}},
      {"gradients", {[](StepProtocol& p) { (void)p.begin_step(); }, {"finish"}}},
      {"summed",
       {[](StepProtocol& p) {
          (void)p.begin_step();
          (void)p.finish_gradients();
        },
        {"finish", "update"}}},
      {"updating", {[](StepProtocol& p) { update(p); }, {"commit"}}},
      {"editing", {[](StepProtocol& p) { (void)p.begin_edit(); }, {"commit"}}},
      {"committing",
       {[](StepProtocol& p) {
          update(p);
          (void)p.start_commit(false);
        },
        {}}},
  };
  for (const auto& [phase, at] : phases) {
    for (const auto& [name, call] : calls) {
      SCOPED_TRACE(name + " in " + phase);
      StepProtocol protocol = written();
      at.reach(protocol);
      const Phase before = protocol.phase();
      const Status status = call(protocol);
      const bool allowed = testing::Matches(testing::Contains(name))(at.allowed);
      EXPECT_EQ(status.ok(), allowed);
      if (allowed) continue;
      EXPECT_EQ(status.code(), ErrorCode::kFailedPrecondition);
      EXPECT_EQ(protocol.phase(), before);
    }
  }
}

}  // namespace
}  // namespace smartinf::engine
