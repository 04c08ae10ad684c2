#include "smartinf/plan/pipeline_schedule.h"

#include <algorithm>
#include <map>
#include <optional>
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
/// when the last one ends. Checks what the header says on the way. Times are of a stage's chunk;
/// chunks 0: all units stay. head: time of a folded head's forward and backward.
double run(uint32_t stages, uint64_t micro_batches, uint32_t ahead, const Times& times,
           uint32_t chunks = 0, std::optional<double> head = {}) {
  using Part = std::pair<uint32_t, uint64_t>;  // of the model, and micro batch
  struct Stage {
    std::vector<PipelineAction> actions;
    size_t next = 0;
    double now = 0;
    std::map<uint32_t, uint64_t> forward;  // by chunk
    std::map<uint32_t, uint64_t> backward;
    double sent_on = 0;    // when the link to the stage behind is free
    double sent_back = 0;  // likewise before
  };
  std::vector<Stage> all(stages);
  std::map<Part, double> inputs;
  std::map<Part, double> gradients;
  const uint32_t each = std::max(1u, chunks);
  const uint32_t head_part = stages * each;
  const uint32_t last_part = head_part - (head ? 0 : 1);
  for (uint32_t s = 0; s < stages; ++s) {
    const uint32_t here = each + (head && s == 0 ? 1 : 0);
    all[s].actions = chunks > 0
                         ? looped_actions(here, micro_batches)
                         : pipeline_actions(stages, s, micro_batches, ahead, head.has_value());
    EXPECT_EQ(all[s].actions.size(), 2 * micro_batches * here);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t s = 0; s < stages; ++s) {
      Stage& stage = all[s];
      while (stage.next < stage.actions.size()) {
        const auto& [kind, i, chunk] = stage.actions[stage.next];
        const bool forward = kind == Kind::kForward;
        const uint32_t part = chunk * stages + s;
        const auto& awaited = forward ? inputs : gradients;
        if (part != (forward ? 0 : last_part)) {
          if (!awaited.contains({part, i})) break;
          stage.now = std::max(stage.now, awaited.at({part, i}));
        }
        if (part == head_part) {
          stage.now += forward ? 0 : *head;
        } else {
          stage.now += forward ? times.forward : times.backward;
        }
        uint64_t& ahead_here = stage.forward[chunk];
        uint64_t& back_here = stage.backward[chunk];
        EXPECT_EQ(i, forward ? ahead_here++ : back_here++) << "in ascending order";
        EXPECT_LE(back_here, ahead_here);
        if (chunks == 0) {
          EXPECT_LE(ahead_here - back_here,
                    pipeline_in_flight(stages, s, micro_batches, ahead, head.has_value()));
        }
        if (part != (forward ? last_part : 0)) {
          double& link = forward ? stage.sent_on : stage.sent_back;
          link = std::max(link, stage.now) + times.message;
          forward ? inputs[{part + 1, i}] = link : gradients[{part - 1, i}] = link;
        }
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

TEST(PipelineSchedule, ChunksAreWaitedForOnlyAtTheBeginAndTheEnd) {
  for (uint32_t stages = 2; stages <= 4; ++stages) {
    for (uint32_t chunks = 2; chunks <= 5; ++chunks) {
      for (uint64_t micro_batches = 1; micro_batches <= 12; ++micro_batches) {
        SCOPED_TRACE(testing::Message() << stages << " stages of " << chunks << " chunks, "
                                        << micro_batches << " micro batches");
        const double took = run(stages, micro_batches, 0, {1, 2, 0}, chunks);
        run(stages, micro_batches, 0, {1, 2, 5}, chunks);
        if (micro_batches < stages) continue;  // else a stage waits for the last one's chunk
        EXPECT_DOUBLE_EQ(took, 3.0 * static_cast<double>(chunks * micro_batches + stages - 1));
      }
    }
  }
}

TEST(PipelineSchedule, AChunkDoesAllMicroBatchesBeforeTheNextOne) {
  EXPECT_EQ(looped_actions(2, 2), (std::vector<PipelineAction>{{Kind::kForward, 0, 0},
                                                               {Kind::kForward, 1, 0},
                                                               {Kind::kForward, 0, 1},
                                                               {Kind::kForward, 1, 1},
                                                               {Kind::kBackward, 0, 1},
                                                               {Kind::kBackward, 1, 1},
                                                               {Kind::kBackward, 0, 0},
                                                               {Kind::kBackward, 1, 0}}));
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

TEST(PipelineSchedule, AFoldedHeadIsBehindTheLastStageAndNobodyWaitsForEver) {
  for (uint32_t stages = 2; stages <= 6; ++stages) {
    for (uint64_t micro_batches = 1; micro_batches <= 20; ++micro_batches) {
      for (uint32_t ahead = 0; ahead <= kPipelineAheadMax; ++ahead) {
        for (const double message : {0.0, 0.7, 5.0}) {
          for (const uint32_t chunks : {0u, 2u, 3u}) {
            SCOPED_TRACE(testing::Message() << stages << " stages of " << chunks << " chunks, "
                                            << micro_batches << " micro batches, " << ahead);
            run(stages, micro_batches, ahead, {1, 2, message}, chunks, 1.5);
          }
        }
      }
    }
    // A head of no time is as if the last stage had it; messages are hidden as before.
    for (const double message : {0.0, 1.5, 3.0}) {
      const auto took = [&](uint64_t micro_batches) {
        return run(stages, micro_batches, 2, {1, 2, message}, 0, 0.0);
      };
      if (stages == 6 && message == 3) continue;  // the way back takes more than half of all
      EXPECT_DOUBLE_EQ((took(80) - took(60)) / 20, 3) << stages << " " << message;
      if (message == 0) {
        EXPECT_NEAR(took(60), 3.0 * (60 + stages - 1), 3) << "a micro batch more at most";
      }
    }
  }
  EXPECT_EQ(pipeline_actions(2, 0, 1, 2, true),
            (std::vector<PipelineAction>{{Kind::kForward, 0, 0},
                                         {Kind::kForward, 0, 1},
                                         {Kind::kBackward, 0, 1},
                                         {Kind::kBackward, 0, 0}}));
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
