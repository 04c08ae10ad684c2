#include "smartinf/plan/stages.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/state_format.h"
#include "smartinf/plan/stage_plan.h"

namespace smartinf::plan {
namespace {

/// The smallest of all divisions of units [first, end) among the stages from `stage` on.
double least(uint32_t first, uint32_t end, uint32_t stage, uint32_t stages, const StageCost& cost) {
  if (stage + 1 == stages) return cost(stage, first, end);
  double best = 1e300;
  for (uint32_t middle = first + 1; middle + stages - stage - 1 <= end; ++middle) {
    best = std::min(
        best, std::max(cost(stage, first, middle), least(middle, end, stage + 1, stages, cost)));
  }
  return best;
}

TEST(Stages, NoDivisionIsBetterThanTheOneThatIsFound) {
  std::mt19937 draw(7);
  for (int round = 0; round < 300; ++round) {
    const auto units = static_cast<uint32_t>(1 + draw() % 12);
    const auto stages = static_cast<uint32_t>(1 + draw() % std::min(units, 4u));
    std::vector<double> costs(units);
    for (double& cost : costs) cost = static_cast<double>(draw() % 20);
    std::vector<double> limits, slower;  // a stage above its limit does not fit
    for (uint32_t stage = 0; stage < stages; ++stage) {
      limits.push_back(static_cast<double>(5 + draw() % 40));
      slower.push_back(static_cast<double>(1 + draw() % 3));
    }
    const auto cost = [&](uint32_t stage, uint32_t first, uint32_t end) {
      double sum = 0;
      for (uint32_t unit = first; unit < end; ++unit) sum += costs[unit];
      return (sum > limits[stage] ? 1e6 : 0) + slower[stage] * sum;
    };
    const std::vector<uint32_t> begins = split_units(units, stages, cost);
    ASSERT_EQ(begins.size(), stages + 1);
    EXPECT_EQ(begins.front(), 0u);
    EXPECT_EQ(begins.back(), units);
    double most = 0;
    for (uint32_t stage = 0; stage < stages; ++stage) {
      ASSERT_LT(begins[stage], begins[stage + 1]) << "every stage has a unit";
      most = std::max(most, cost(stage, begins[stage], begins[stage + 1]));
    }
    EXPECT_DOUBLE_EQ(most, least(0, units, 0, stages, cost));
  }
}

TEST(Stages, NoDivisionHasALesserSumOfTwo) {
  std::mt19937 draw(11);
  for (int round = 0; round < 200; ++round) {
    const auto units = static_cast<uint32_t>(3 + draw() % 7);
    std::vector<double> computing(units), drives(units), slower(3);
    for (double& one : computing) one = static_cast<double>(draw() % 20);
    for (double& one : drives) one = static_cast<double>(draw() % 20);
    for (double& one : slower) one = static_cast<double>(1 + draw() % 4);
    const auto sum_of = [](const std::vector<double>& of, uint32_t first, uint32_t end) {
      return std::accumulate(of.begin() + first, of.begin() + end, 0.0);
    };
    const StageCost each = [&](uint32_t, uint32_t first, uint32_t end) {
      return sum_of(computing, first, end);
    };
    const StageCost once = [&](uint32_t stage, uint32_t first, uint32_t end) {
      return slower[stage] * sum_of(drives, first, end);
    };
    const auto value = [&](const std::vector<uint32_t>& begins) {
      double most_each = 0, most_once = 0;
      for (uint32_t stage = 0; stage < 3; ++stage) {
        most_each = std::max(most_each, each(stage, begins[stage], begins[stage + 1]));
        most_once = std::max(most_once, once(stage, begins[stage], begins[stage + 1]));
      }
      return most_each + most_once;
    };
    double least = 1e300;
    for (uint32_t second = 1; second + 1 < units; ++second) {
      for (uint32_t third = second + 1; third < units; ++third) {
        least = std::min(least, value({0, second, third, units}));
      }
    }
    EXPECT_DOUBLE_EQ(value(split_units(units, 3, each, once)), least);
  }
}

TEST(Stages, ALargeHeadTakesTheLayersOfItsStage) {
  // 12 layers of GPT-2 small with its vocabulary, whose head is as much as 5.4 layers.
  const std::vector<Unit> units = make_units({38'597'376 + 786'432, 7'087'872, 12, 1536});
  const StageCosts model{units, 768, 38'597'376, 1024};
  const auto begins = divide_units(model, 2);
  EXPECT_EQ(*begins, (std::vector<uint32_t>{0, 9, 14}));  // 8 layers, and 4 with the head
  EXPECT_EQ(*divide_units(model, 2, {}, /*folds=*/true), (std::vector<uint32_t>{0, 5, 13, 14}));
  // Hidden states and gradients of 1.5 tokens for each of the vocabulary are as much as a copy.
  TiedHead head{.vocabulary = 50'257, .width = 768, .tokens = 75'385};
  EXPECT_TRUE(head_folds(head));
  ++head.tokens;
  EXPECT_FALSE(head_folds(head));
  head.replicas = 2;  // each has a copy, and only all together so many tokens
  EXPECT_TRUE(head_folds(head));
}

TEST(Stages, MemoryMovesLayersToTheStageThatHasIt) {
  const std::vector<Unit> units = make_units({1000, 100, 8, 1000});
  const StageCosts model{units, 10, 1000, 0};
  ASSERT_EQ(*divide_units(model, 2), (std::vector<uint32_t>{0, 9, 10}));
  const auto most = [](uint32_t first_most, uint32_t second_most) {
    return [=](uint32_t stage, uint32_t) { return stage == 0 ? first_most : second_most; };
  };
  using Begins = std::vector<uint32_t>;
  EXPECT_EQ(divide_units_by_memory(model, 2, false, most(9, 9)), Begins({0, 9, 10}));
  EXPECT_EQ(divide_units_by_memory(model, 2, false, most(5, 9)), Begins({0, 5, 10}));
  EXPECT_EQ(divide_units_by_memory(model, 2, true, most(9, 5)), Begins({0, 4, 9, 10}));
  EXPECT_EQ(divide_units_by_memory(model, 2, false, most(4, 5)), Begins());
}

TEST(Stages, ASplitSaysTheLayersOfEachStage) {
  const std::vector<Unit> units{
      {0, 9, 0, 0}, {9, 2, 0, 2}, {11, 2, 2, 2}, {13, 1, 4, 1}, {14, 9, 0, 0}};
  const StageCosts model{units, 1, 9, 1};
  EXPECT_EQ(*divide_units(model, 2, "2, 3"), (std::vector<uint32_t>{0, 2, 5}));
  EXPECT_EQ(*divide_units(model, 3, "0,4,1"), (std::vector<uint32_t>{0, 1, 3, 5}));
  EXPECT_EQ(*divide_units(model, 2, " 5 , 0 "), (std::vector<uint32_t>{0, 4, 5}));
  for (const char* wrong : {"5", "2, 2", "2, 3,", "2 3", "-1, 6", "3, 2", "x", "4, 0, 1"}) {
    const auto begins = divide_units(model, std::string_view(wrong).size() == 7 ? 3 : 2, wrong);
    EXPECT_FALSE(begins.ok()) << wrong;
    EXPECT_NE(begins.status().what().find("ranks.split"), std::string::npos) << wrong;
  }
  EXPECT_FALSE(divide_units(model, 6).ok());
  EXPECT_EQ(*divide_units(model, 2, "2, 3", true), (std::vector<uint32_t>{0, 2, 4, 5}));
  EXPECT_FALSE(divide_units(model, 2, "5, 0", true).ok()) << "the last stage has not even the head";
}

TEST(Stages, AsManyMicroBatchesAheadAsCostNoRankAnything) {
  using enum AheadCost;
  EXPECT_EQ(most_ahead(std::vector{kKeeps, kKeeps, kRecomputes, kKeeps, kKeeps, kKeeps}), 1u);
  EXPECT_EQ(most_ahead(std::vector{kKeeps, kKeeps, kKeeps, kRecomputes, kDoesNotFit, kDoesNotFit}),
            0u);
  EXPECT_EQ(most_ahead(std::vector{kRecomputes, kRecomputes, kRecomputes}), 2u);
  EXPECT_EQ(
      most_ahead(std::vector{kDoesNotFit, kRecomputes, kKeeps, kKeeps, kRecomputes, kDoesNotFit}),
      1u);
  EXPECT_EQ(most_ahead(std::vector{kDoesNotFit, kDoesNotFit, kDoesNotFit}), 0u);
}

TEST(Stages, RanksOfAStageAreNextToEachOther) {
  const Stages stages{{0, 2, 3}, 2};
  const std::vector<Unit> units{{0, 10, 0, 0}, {10, 20, 0, 1}, {30, 5, 0, 0}};
  EXPECT_EQ(stages.count(), 2u);
  EXPECT_EQ(stages.of_rank(1), 0u);
  EXPECT_EQ(stages.of_rank(2), 1u);
  EXPECT_EQ(stages.replica(3), 1u);
  EXPECT_EQ(stages.of_unit(0), 0u);
  EXPECT_EQ(stages.of_unit(1), 0u);
  EXPECT_EQ(stages.of_unit(2), 1u);
  const auto spans = rank_spans(stages, units, /*tied=*/8);
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(spans[0].count, 8u);
  EXPECT_TRUE(spans[0].has_rank(3));
  EXPECT_FALSE(spans[0].has_rank(1));
  EXPECT_EQ(spans[1].end(), 30u);
  EXPECT_TRUE(spans[1].has_rank(0));
  EXPECT_EQ(spans[2].first, 30u);
  EXPECT_EQ(rank_spans(stages, units).size(), 2u);
  EXPECT_EQ((Pipeline{stages, 1, 0}.units(/*tied=*/true)), (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ((Pipeline{stages, 3, 0}.units(/*tied=*/true)), (std::vector<uint32_t>{0, 2}));
}

TEST(Stages, AFoldedHeadIsTheFirstStages) {
  const Stages stages{{0, 2, 3, 4}, 2, 1, /*folds=*/true};
  const std::vector<Unit> units{{0, 10, 0, 0}, {10, 20, 0, 1}, {30, 20, 1, 1}, {50, 5, 0, 0}};
  EXPECT_EQ(stages.count(), 2u);
  EXPECT_EQ(stages.of_head(), 0u);
  EXPECT_EQ(stages.of_unit(2), 1u);
  EXPECT_EQ(stages.of_unit(3), 0u);
  EXPECT_EQ((Pipeline{stages, 1, 0}.units(/*tied=*/true)), (std::vector<uint32_t>{0, 1, 3}));
  EXPECT_EQ((Pipeline{stages, 2, 0}.units(/*tied=*/true)), (std::vector<uint32_t>{2}));
  const auto spans = rank_spans(stages, units, /*tied=*/8);
  ASSERT_EQ(spans.size(), 4u);
  for (const size_t first : {0, 1, 3}) EXPECT_TRUE(spans[first].has_rank(1)) << first;
  EXPECT_TRUE(spans[2].has_rank(2));
  EXPECT_FALSE(spans[2].has_rank(1));
}

TEST(Stages, StagesHavePartsByTurns) {
  const Stages stages{{0, 1, 2, 4, 5}, 1, 2};
  const std::vector<Unit> units{
      {0, 4, 0, 0}, {4, 4, 0, 1}, {8, 4, 1, 1}, {12, 4, 2, 1}, {16, 4, 0, 0}};
  EXPECT_EQ(stages.count(), 2u);
  EXPECT_EQ(stages.of_unit(1), 1u);
  EXPECT_EQ(stages.of_unit(3), 0u);
  EXPECT_EQ((Pipeline{stages, 0, 0}.units(false)), (std::vector<uint32_t>{0, 2, 3}));
  EXPECT_EQ((Pipeline{stages, 1, 0}.units(true)), (std::vector<uint32_t>{0, 1, 4}));
  const auto spans = rank_spans(stages, units);
  ASSERT_EQ(spans.size(), 4u);
  EXPECT_EQ(spans[2].count, 8u);
  EXPECT_TRUE(spans[2].has_rank(0));
  EXPECT_TRUE(spans[3].has_rank(1));
}

/// Of a model of two layers, whose head is the embedding, without the head's norm.
const std::vector<Unit> kTiedUnits{
    {0, 1 << 20, 0, 0}, {1 << 20, 1 << 20, 0, 1}, {2 << 20, 1 << 20, 1, 1}, {3 << 20, 64, 0, 0}};

TrainingMemoryInput of_stage(const Stages& stages, uint32_t rank, uint32_t ahead) {
  TrainingMemoryInput input;
  input.units = kTiedUnits;
  input.model.layers = 2;
  input.model.vocabulary = 1 << 10, input.model.width = 1 << 10;
  input.model.tied = true;
  input.accumulation = 4;
  take_stage({stages, rank, ahead}, input);
  return input;
}

/// "4, 3 layers" : what is in flight, and of what there are sums.
std::string text_of(const std::vector<BackwardMoment>& moments) {
  std::string text;
  for (const BackwardMoment& one : moments) {
    text += (text.empty() ? "" : ", ") + std::to_string(one.in_flight);
    if (!one.layers) text += " in the head";
    if (!one.head) text += " in layers";
    if (one.head_summed) text += " head";
    if (one.layers_summed) text += " layers";
  }
  return text;
}

TEST(Stages, SumsAreNotThereWhileTheFirstMicroBatchGoesBack) {
  const Stages stages{{0, 2, 4}, 1};
  EXPECT_EQ(text_of(of_stage(stages, 0, 2).moments), "4, 3 head layers");
  EXPECT_EQ(text_of(of_stage(stages, 0, 0).moments), "2, 2 head layers");
  EXPECT_EQ(text_of(of_stage(stages, 1, 2).moments), "1, 1 head layers");
  // A folded head has its sums before the layers have theirs.
  const Stages folded{{0, 2, 3, 4}, 1, 1, /*folds=*/true};
  EXPECT_EQ(text_of(of_stage(folded, 0, 0).moments),
            "2 in the head, 3 in the head head, 3 in layers head, 3 in the head head layers, "
            "3 in layers head layers");
  EXPECT_EQ(text_of(of_stage(folded, 1, 0).moments), "2, 2 head layers");
}

TEST(Stages, MessagesAreThoseThatAreSentAndAwaited) {
  const Stages stages{{0, 2, 4}, 1};
  EXPECT_EQ(of_stage(stages, 0, 0).messages, 2u + 1) << "activations there, gradients back";
  EXPECT_EQ(of_stage(stages, 1, 2).messages, 4u + 3);
  const Stages folded{{0, 2, 3, 4}, 1, 1, /*folds=*/true};
  EXPECT_EQ(of_stage(folded, 0, 0).messages, 2 * (3u + 1)) << "and of the head";
}

TEST(Stages, AStageExchangesWhatAnotherOneHasAsWell) {
  const Stages stages{{0, 2, 4}, 1};
  const uint64_t all = kTiedUnits.back().end();
  const uint64_t block = base::kBlockElements;
  const auto state = [&](uint32_t rank, uint64_t tied, std::vector<Subgroup> held = {}) {
    return stage_state({stages, rank, 0}, kTiedUnits, tied, /*subgroup_elements=*/1 << 19, held);
  };
  // At its end, a piece of a gradient and the weights of a block.
  EXPECT_TRUE(state(0, 0).is_own);
  EXPECT_EQ(state(0, 0).elements, uint64_t{2} << 20);
  EXPECT_EQ(state(0, 0).exchange.elements, kRankPieceElements);
  EXPECT_EQ(state(0, 0).exchange.subgroup_elements, block);
  EXPECT_EQ(state(0, 0).exchange.ranks, 0u);
  // A tied head's sums come from two stages.
  EXPECT_EQ(state(1, 1 << 20).exchange.elements, kRankPieceElements + (1 << 20));
  EXPECT_EQ(state(1, 1 << 20).exchange.subgroup_elements, uint64_t{1} << 19);
  EXPECT_EQ(state(1, 1 << 20).exchange.ranks, 2u);
  EXPECT_EQ(state(1, 1 << 20).elements, (uint64_t{1} << 20) + 64) << "the state is the first's";
  // Replicas sum up all of the stage's.
  const StageState shared = stage_state({{{0, 2, 4}, 2}, 0, 0}, kTiedUnits, 0, 1 << 19);
  EXPECT_EQ(shared.exchange.elements, uint64_t{2} << 20);
  EXPECT_EQ(shared.exchange.ranks, 2u);

  // Of a run that was begun so everything is still there, and of another one all of it may go.
  const Subgroup first{{}, 0, 1 << 20}, second{{}, 1 << 20, 1 << 20}, third{{}, 2 << 20, 1 << 20};
  EXPECT_TRUE(state(0, 0, {first, second}).is_own);
  EXPECT_TRUE(state(0, 0, {first, {{}, 1 << 20, (1 << 20) - block}}).is_own);
  // A division that is only tried: stages before have nothing, and those behind what is left.
  EXPECT_EQ(stage_state({{{3, 3, 4}, 1}, 1, 0}, kTiedUnits, 0, 1 << 19).elements, 64u);
  EXPECT_EQ(stage_state({{{0, 0, 4}, 1}, 0, 0}, kTiedUnits, 0, 1 << 19).elements, 0u);
  for (const auto& held : std::vector<std::vector<Subgroup>>{{first}, {first, second, third}}) {
    const StageState moved = state(0, 0, held);
    EXPECT_FALSE(moved.is_own);
    EXPECT_EQ(moved.exchange.elements, all);
    EXPECT_EQ(moved.exchange.subgroup_elements, uint64_t{1} << 19);
    EXPECT_EQ(moved.of_others, held.size() == 3 ? uint64_t{1} << 20 : 0);
  }
}

}  // namespace
}  // namespace smartinf::plan
