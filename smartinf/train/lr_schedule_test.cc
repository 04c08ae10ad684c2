#include "smartinf/train/lr_schedule.h"

#include <gtest/gtest.h>

namespace smartinf::train {
namespace {

TEST(LearningRate, WarmsUpThenFallsToTheFloor) {
  TrainOptions options;
  options.lr = 1;
  options.lr_floor = 0.1;
  options.warmup_steps = 10;
  options.steps = 110;
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 1);
  EXPECT_NEAR(learning_rate(options, 60), 0.55, 1e-12);  // half-way down the cosine
  EXPECT_DOUBLE_EQ(learning_rate(options, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 200), 0.1);
}

TEST(LearningRate, LinearFallsToTheFloorAndConstantDoesNot) {
  TrainOptions options;
  options.lr = 2;
  options.lr_floor = 0.5;
  options.warmup_steps = 10;
  options.steps = 110;
  options.schedule = LrSchedule::kLinear;
  EXPECT_DOUBLE_EQ(learning_rate(options, 5), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 2);
  EXPECT_DOUBLE_EQ(learning_rate(options, 60), 1.5);
  EXPECT_DOUBLE_EQ(learning_rate(options, 110), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 300), 1);
  options.schedule = LrSchedule::kConstant;
  EXPECT_DOUBLE_EQ(learning_rate(options, 5), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 60), 2);
  EXPECT_DOUBLE_EQ(learning_rate(options, 300), 2);
}

TEST(LearningRate, WarmupStableDecayFallsInTheLastStepsOnly) {
  TrainOptions options;
  options.lr = 1;
  options.lr_floor = 0;
  options.warmup_steps = 10;
  options.steps = 100;
  options.decay_share = 0.2;
  options.schedule = LrSchedule::kWarmupStableDecay;
  EXPECT_DOUBLE_EQ(learning_rate(options, 5), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(options, 11), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 80), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 90), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(options, 100), 0);
  options.decay_share = 0;
  EXPECT_DOUBLE_EQ(learning_rate(options, 100), 1);
}

TEST(LearningRate, WithoutWarmUpOrWithNothingElse) {
  TrainOptions options;
  options.lr = 1;
  options.steps = 1;
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), options.lr_floor);
  options.warmup_steps = 1;
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 1);
}

TEST(LearningRate, ARunShorterThanItsWarmUpEndsWithinIt) {
  TrainOptions options;
  options.lr = 1;
  options.warmup_steps = 50;
  options.steps = 20;
  EXPECT_DOUBLE_EQ(learning_rate(options, 20), 0.4);
  EXPECT_DOUBLE_EQ(learning_rate(options, 51), options.lr_floor);
}

}  // namespace
}  // namespace smartinf::train
