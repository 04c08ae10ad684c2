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
