// The update kernels against the scalar truth, bit by bit, checksums included, with streams that
// stall at random.
#include <cstdlib>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "smartinf/kernels/rules.h"

#include "fpga/tests/subgroup.h"

namespace smartinf::fpga {
namespace {

using base::DataType;
using kernels::GroupOptions;
using kernels::RuleOptions;
using kernels::UpdateRule;

constexpr UpdateRule kRules[] = {UpdateRule::kAdamW, UpdateRule::kAdam, UpdateRule::kSgdMomentum,
                                 UpdateRule::kAdagrad};

kernels::StepScalars scalars_of(UpdateRule rule, uint64_t variant) {
  RuleOptions options;
  options.rule = rule;
  options.maximize = variant % 3 == 1;
  if (rule == UpdateRule::kSgdMomentum) {
    options.dampening = variant % 2 == 0 ? 0 : 0.3;
    options.nesterov = variant % 4 == 2;
    if (variant % 5 == 4) options.beta1 = 0;
  } else if (rule == UpdateRule::kAdagrad) {
    options.lr_decay = variant % 2 == 0 ? 0 : 0.1;
    options.initial_accumulator_value = 0.125;
  } else if (variant % 4 == 3) {
    options.beta1 = 0.25;  // lerp from its other end
  }
  GroupOptions group;
  group.lr = 1e-3 * static_cast<double>(1 + variant % 7);
  group.weight_decay = variant % 2 == 0 ? 0 : 0.02;
  group.skip = variant % 11 == 10;
  const auto step = static_cast<base::StepNumber>(1 + variant % 3);
  return kernels::make_step_scalars(options, group, step, 0.75, 9);
}

Step make_step(UpdateRule rule, uint32_t count, uint64_t variant) {
  Step step;
  step.rule = rule;
  step.count = count;
  step.spans = {{count, scalars_of(rule, variant)}};
  step.gradient_type = variant % 2 == 0 ? DataType::kBf16 : DataType::kF32;
  constexpr std::optional<DataType> kWeights[] = {DataType::kBf16, DataType::kF32, std::nullopt};
  step.weights_type = kWeights[variant % 3];
  return step;
}

void expect_truth(const Step& step, uint64_t seed, bool edges, const software::Options& options) {
  Subgroup card(step.rule, step.count, seed, edges);
  Subgroup truth = card;
  const std::vector<Word> gradient = make_gradient(step.gradient_type, step.count, seed, edges);
  ASSERT_EQ(
      card.update_on_card(step, dense_gradient(gradient, step.gradient_type, step.count), options),
      "");
  truth.update_by_truth(step, gradient.data());
  ASSERT_EQ(card.difference(truth), "")
      << kernels::update_rule_name(step.rule) << " of " << step.count << ", seed " << seed;
}

TEST(Update, EveryRuleAndLengthUpToSeveralWords) {
  for (const UpdateRule rule : kRules) {
    for (uint32_t count = 1; count <= 100; ++count) {
      for (uint64_t variant = 0; variant < 3; ++variant) {
        expect_truth(make_step(rule, count, count * 3 + variant), count, true,
                     {.seed = count, .stall_one_in = 3});
      }
    }
  }
}

TEST(Update, NothingIsNothing) {
  for (const UpdateRule rule : kRules) expect_truth(make_step(rule, 0, 1), 1, true, {});
}

TEST(Update, BlocksAndBursts) {
  for (const UpdateRule rule : kRules) {
    uint64_t variant = 0;
    for (const uint32_t count :
         {16 * kBurstWords - 1, 3 * 16 * kBurstWords + 5, 65535, 65536, 65537, 2 * 65536 + 777}) {
      ++variant;
      expect_truth(make_step(rule, static_cast<uint32_t>(count), variant), variant,
                   variant % 2 == 0,
                   {.seed = variant, .stall_one_in = variant % 2 == 0 ? 0u : 50u});
    }
  }
}

// Spans begin and end anywhere, several in a word, some empty, some skipped.
TEST(Update, SpansWithinWords) {
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 60; ++trial) {
    const UpdateRule rule = kRules[trial % 4];
    Step step = make_step(rule, 0, static_cast<uint64_t>(trial));
    step.spans.clear();
    const uint64_t longest = trial % 3 == 0 ? 4 : trial % 3 == 1 ? 40 : 400;
    for (int s = 0; s < 30; ++s) {
      const uint64_t count = random() % longest;
      step.spans.push_back({count, scalars_of(rule, random() % 100)});
      step.count += static_cast<uint32_t>(count);
    }
    expect_truth(step, static_cast<uint64_t>(trial), true,
                 {.seed = static_cast<uint64_t>(trial), .stall_one_in = 4});
  }
}

TEST(Update, WhatNoSpanHoldsStays) {
  Step step = make_step(UpdateRule::kAdamW, 100, 0);
  step.spans[0].count = 37;
  Subgroup card(step.rule, 100, 1, false);
  Subgroup truth = card;
  const std::vector<Word> gradient = make_gradient(step.gradient_type, 100, 1, false);
  ASSERT_EQ(card.update_on_card(step, dense_gradient(gradient, step.gradient_type, 100), {}), "");
  kernels::StepScalars skipped = step.spans[0].scalars;
  skipped.skip = true;
  step.spans.push_back({63, skipped});
  truth.update_by_truth(step, gradient.data());
  EXPECT_EQ(card.difference(truth), "");
}

// As little room as hardware can have: what would wait for itself is found here.
TEST(Update, NoDeadlockWithStreamsOfOneElement) {
  for (const UpdateRule rule : kRules) {
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      expect_truth(make_step(rule, 70000, seed), seed, false,
                   {.seed = seed, .stall_one_in = 5, .stream_depth = 1});
    }
  }
}

TEST(Update, AGradientThatIsTooShortIsNamed) {
  const Step step = make_step(UpdateRule::kAdam, 1000, 0);
  Subgroup card(step.rule, 1000, 1, false);
  const std::vector<Word> gradient = make_gradient(step.gradient_type, 1000, 1, false);
  const std::string said =
      card.update_on_card(step, dense_gradient(gradient, step.gradient_type, 900), {});
  EXPECT_NE(said.find("waits for an element in gradients"), std::string::npos) << said;
}

TEST(Update, AFlippedBitChangesTheChecksumOfWhatWasRead) {
  const Step step = make_step(UpdateRule::kAdamW, 5000, 0);
  const std::vector<Word> gradient = make_gradient(step.gradient_type, 5000, 1, false);
  Subgroup whole(step.rule, 5000, 1, false);
  Subgroup flipped = whole;
  bytes_of(flipped.planes[1])[12345] ^= 4;
  for (Subgroup* card : {&whole, &flipped}) {
    ASSERT_EQ(card->update_on_card(step, dense_gradient(gradient, step.gradient_type, 5000), {}),
              "");
  }
  EXPECT_EQ(wide_lane(whole.report[0], 0), wide_lane(flipped.report[0], 0));
  EXPECT_NE(wide_lane(whole.report[0], 1), wide_lane(flipped.report[0], 1));
  EXPECT_EQ(wide_lane(whole.report[0], 2), wide_lane(flipped.report[0], 2));
}

// 1e8 elements in scripts/nightly.sh.
TEST(Update, ManyElements) {
  const char* wanted = std::getenv("SMARTINF_TEST_FPGA_ELEMENTS");
  const auto count = static_cast<uint32_t>(wanted != nullptr ? std::atof(wanted) : 3e5) + 9;
  expect_truth(make_step(UpdateRule::kAdamW, count, 4), 4, false, {});
}

}  // namespace
}  // namespace smartinf::fpga
