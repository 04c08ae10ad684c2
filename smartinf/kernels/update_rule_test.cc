#include "smartinf/kernels/update_rule.h"

#include <cmath>

#include <gtest/gtest.h>

namespace smartinf::kernels {
namespace {

TEST(UpdateRule, NamesComeBack) {
  EXPECT_EQ(all_update_rules().size(), 5u);
  for (const UpdateRule rule : all_update_rules()) {
    EXPECT_EQ(update_rule_from_name(update_rule_name(rule)), rule);
    EXPECT_EQ(rule_planes(rule).front(), base::PlaneKind::kMaster);
  }
  EXPECT_FALSE(update_rule_from_name("adamww"));
}

TEST(StepScalars, BiasCorrectionIsComputedInDouble) {
  const StepScalars scalars = make_step_scalars({.beta1 = 0.9, .beta2 = 0.999},
                                                {.lr = 1e-3, .weight_decay = 0.1}, 3, 0.5, 7);
  const double bias2_sqrt = std::sqrt(1 - std::pow(0.999, 3));
  EXPECT_EQ(scalars.step_size, static_cast<float>(1e-3 * bias2_sqrt / (1 - std::pow(0.9, 3))));
  EXPECT_EQ(scalars.eps, static_cast<float>(1e-8 * bias2_sqrt));
  // In f32, 1 - 0.999f is off by 1e-5 relative.
  EXPECT_EQ(scalars.one_minus_beta2, static_cast<float>(0.001));
  EXPECT_EQ(scalars.decay_factor, static_cast<float>(1 - 1e-4));
  EXPECT_EQ(scalars.weight_decay, 0.0f);
  EXPECT_EQ(scalars.gradient_scale, 0.5f);
  EXPECT_EQ(scalars.step, 3u);
  EXPECT_EQ(scalars.seed, 7u);
  EXPECT_FALSE(scalars.first_step);
}

TEST(StepScalars, DecayGoesWhereTheRuleWantsIt) {
  const GroupOptions group{.lr = 0.1, .weight_decay = 0.5};
  for (const UpdateRule rule : all_update_rules()) {
    const StepScalars scalars = make_step_scalars({.rule = rule}, group, 1, 1, 0);
    const bool decoupled = rule == UpdateRule::kAdamW || rule == UpdateRule::kLion;
    EXPECT_EQ(scalars.decay_factor, decoupled ? 0.95f : 1.0f) << update_rule_name(rule);
    EXPECT_EQ(scalars.weight_decay, decoupled ? 0.0f : 0.5f) << update_rule_name(rule);
    EXPECT_TRUE(scalars.first_step);
  }
}

TEST(StepScalars, AdagradsRateFalls) {
  const StepScalars scalars =
      make_step_scalars({.rule = UpdateRule::kAdagrad, .lr_decay = 0.5}, {.lr = 1}, 5, 1, 0);
  EXPECT_EQ(scalars.step_size, static_cast<float>(1.0 / 3.0));
}

TEST(StepScalars, AGroupHasItsOwnStepAndOptions) {
  const RuleOptions run;
  const RuleOptions own{.beta1 = 0.5, .eps = 1e-3};
  const StepScalars scalars = make_step_scalars(run, {.lr = 1, .step = 2, .rule = own}, 9, 1, 0);
  const double bias2_sqrt = std::sqrt(1 - std::pow(0.999, 2));
  EXPECT_EQ(scalars.step_size, static_cast<float>(bias2_sqrt / (1 - 0.25)));
  EXPECT_EQ(scalars.eps, static_cast<float>(1e-3 * bias2_sqrt));
  EXPECT_EQ(scalars.step, 9u);  // rounding differs in every step of the updater
  EXPECT_TRUE(make_step_scalars(run, {.step = 1}, 9, 1, 0).first_step);
  EXPECT_FALSE(scalars.skip);
  EXPECT_TRUE(make_step_scalars(run, {.skip = true}, 9, 1, 0).skip);
}

TEST(StepScalarsDeathTest, StepsCountFromOne) {
  EXPECT_DEATH((void)make_step_scalars({}, {}, 0, 1, 0), "count from 1");
}

}  // namespace
}  // namespace smartinf::kernels
