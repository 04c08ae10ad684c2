// How tokens are chosen.
#include "smartinf/train/sampling.h"

#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/train/random.h"

namespace smartinf::train {
namespace {

std::vector<float> logs_of(const std::vector<double>& shares) {
  std::vector<float> logits;
  for (const double share : shares) logits.push_back(static_cast<float>(std::log(share)));
  return logits;
}

std::set<int64_t> drawn(std::span<const float> logits, const Sampling& sampling) {
  std::set<int64_t> tokens;
  for (uint64_t i = 0; i < 400; ++i) tokens.insert(choose_token(logits, sampling, i));
  return tokens;
}

TEST(ChooseToken, OnlyTheLikeliestAreDrawn) {
  const std::vector<float> logits = logs_of({0.1, 0.4, 0.05, 0.3, 0.15});
  EXPECT_THAT(drawn(logits, {}), testing::ElementsAre(1));
  EXPECT_THAT(drawn(logits, {.temperature = 1}), testing::ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(drawn(logits, {.temperature = 1, .top_k = 2}), testing::ElementsAre(1, 3));
  EXPECT_THAT(drawn(logits, {.temperature = 1, .top_p = 0.75}), testing::ElementsAre(1, 3, 4));
  EXPECT_THAT(drawn(logits, {.temperature = 1, .top_p = 0.65}), testing::ElementsAre(1, 3));
  EXPECT_THAT(drawn(logits, {.temperature = 1, .top_k = 1, .top_p = 0.9}), testing::ElementsAre(1));
  EXPECT_THAT(drawn(logits, {.temperature = 0.01}), testing::ElementsAre(1));
}

TEST(ChooseToken, TokensAreAsOftenAsTheirShare) {
  const std::vector<float> logits = logs_of({0.2, 0.5, 0.3});
  std::vector<double> shares(3);
  for (uint64_t i = 0; i < 4000; ++i) {
    shares[static_cast<size_t>(choose_token(logits, {.temperature = 1, .seed = 5}, i))] +=
        1.0 / 4000;
  }
  EXPECT_NEAR(shares[0], 0.2, 0.03);
  EXPECT_NEAR(shares[1], 0.5, 0.03);
}

// Sorted as a whole: a share of one number for each token, the likeliest first, laid end to end.
TEST(ChooseToken, ManyTokensAreDrawnAsIfAllWereSorted) {
  std::vector<double> shares;
  for (size_t i = 0; i < 1000; ++i) shares.push_back(static_cast<double>(1 + i * 7919 % 1000));
  const std::vector<float> logits = logs_of(shares);
  for (const double top_p : {0.3, 0.999, 1.0}) {
    // Tokens' numbers from the likeliest: token i has share 1 + (i * 7919) % 1000 of 500500.
    for (uint64_t draw = 0; draw < 200; ++draw) {
      const Sampling sampling{.temperature = 1, .top_p = top_p, .seed = 3};
      double kept = 0;
      for (double share = 1000; share > 0 && kept < top_p * 500500; --share) kept += share;
      const double drawn = random_uniform(3, draw) * kept;
      double share = 1000;
      for (double sum = share; sum <= drawn; sum += share) --share;
      const int64_t token = choose_token(logits, sampling, draw);
      EXPECT_NEAR(shares[static_cast<size_t>(token)], share, 1) << "draw " << draw;
    }
  }
}

TEST(ChooseToken, GreedyIsTheFirstOfTheLargestAndNotANumberIsAboveAll) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto greedy = [](const std::vector<float>& logits) {
    return choose_token(logits, {.temperature = 0}, 0);
  };
  EXPECT_EQ(greedy({1}), 0);
  EXPECT_EQ(greedy({-3, -1, -2, -1}), 1);
  EXPECT_EQ(greedy({5, 1, 5}), 0);
  EXPECT_EQ(greedy({1, kNan, 7, kNan}), 1);
  EXPECT_EQ(greedy({kNan, 7}), 0);
}

}  // namespace
}  // namespace smartinf::train
