#include "smartinf/plan/pipeline_schedule.h"

#include <algorithm>
#include <map>
#include <utility>

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

using Kind = PipelineAction::Kind;

/// Times of a stage's forward and backward of a micro batch, and of a message.
struct Times {
  double forward = 1;
  double backward = 2;
  double message = 0;
};

/// Runs all stages beside each other, over a link in each direction between neighbours, and returns
/// when the last one ends. Checks what the header says on the way.
double run(uint32_t stages, uint64_t micro_batches, uint32_t ahead, const Times& times) {
  struct Stage {
    std::vector<PipelineAction> actions;
    size_t next = 0;
    double now = 0;
    uint64_t forward = 0;
    uint64_t backward = 0;
    double sent_on = 0;    // when the link to the stage behind is free
    double sent_back = 0;  // likewise before
    std::map<uint64_t, double> inputs;
    std::map<uint64_t, double> gradients;
  };
  std::vector<Stage> all(stages);
  for (uint32_t s = 0; s < stages; ++s) {
    all[s].actions = pipeline_actions(stages, s, micro_batches, ahead);
    EXPECT_EQ(all[s].actions.size(), 2 * micro_batches);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t s = 0; s < stages; ++s) {
      Stage& stage = all[s];
      while (stage.next < stage.actions.size()) {
        const auto& [kind, i] = stage.actions[stage.next];
        const bool forward = kind == Kind::kForward;
        auto& awaited = forward ? stage.inputs : stage.gradients;
        if (s != (forward ? 0 : stages - 1)) {
          if (!awaited.contains(i)) break;
          stage.now = std::max(stage.now, awaited[i]);
        }
        stage.now += forward ? times.forward : times.backward;
        EXPECT_EQ(i, forward ? stage.forward++ : stage.backward++) << "in ascending order";
        EXPECT_LE(stage.backward, stage.forward);
        EXPECT_LE(stage.forward - stage.backward,
                  pipeline_in_flight(stages, s, micro_batches, ahead));
        double& link = forward ? stage.sent_on : stage.sent_back;
        link = std::max(link, stage.now) + times.message;
        if (forward && s + 1 < stages) all[s + 1].inputs[i] = link;
        if (!forward && s > 0) all[s - 1].gradients[i] = link;
        ++stage.next;
        moved = true;
      }
    }
  }
  double end = 0;
  for (const Stage& stage : all) {
    EXPECT_EQ(stage.next, stage.actions.size()) << "stages wait for each other for ever";
    end = std::max(end, stage.now);
  }
  return end;
}

TEST(PipelineSchedule, EveryMicroBatchGoesForwardAndBackOnceAndNobodyWaitsForEver) {
  for (uint32_t stages = 1; stages <= 6; ++stages) {
    for (uint64_t micro_batches = 1; micro_batches <= 12; ++micro_batches) {
      for (uint32_t ahead = 0; ahead <= kPipelineAheadMax; ++ahead) {
        for (const double message : {0.0, 0.7, 5.0}) {
          SCOPED_TRACE(testing::Message() << stages << " stages, " << micro_batches
                                          << " micro batches, " << ahead << " ahead");
          const double took = run(stages, micro_batches, ahead, {1, 2, message});
          // Filling and draining are all that a pipeline without messages loses.
          if (message == 0) {
            EXPECT_DOUBLE_EQ(took, 3.0 * static_cast<double>(micro_batches + stages - 1));
          }
        }
      }
    }
  }
}

TEST(PipelineSchedule, OneStageIsForwardAndBackwardOfOneMicroBatchAfterTheOther) {
  EXPECT_EQ(
      pipeline_actions(1, 0, 2, 2),
      (std::vector<PipelineAction>{
          {Kind::kForward, 0}, {Kind::kBackward, 0}, {Kind::kForward, 1}, {Kind::kBackward, 1}}));
}

TEST(PipelineSchedule, AMessageThatTakesNoLongerThanComputingIsHidden) {
  const auto period = [](uint32_t stages, uint32_t ahead, double message) {
    const Times times{1, 2, message};
    return (run(stages, 60, ahead, times) - run(stages, 40, ahead, times)) / 20;
  };
  for (uint32_t stages = 2; stages <= 5; ++stages) {
    for (const double message : {0.75, 1.5, 3.0}) {
      EXPECT_DOUBLE_EQ(period(stages, 2, message), 3) << stages << " " << message;
    }
    EXPECT_DOUBLE_EQ(period(stages, 2, 6), 6) << "the link's";
    EXPECT_DOUBLE_EQ(period(stages, 1, 1.5), 3);
  }
  // Nothing ahead: each exchange is waited for.
  for (const double message : {0.75, 1.5, 3.0}) {
    EXPECT_DOUBLE_EQ(period(2, 0, message), 3 + message);
  }
}

}  // namespace
}  // namespace smartinf::plan
