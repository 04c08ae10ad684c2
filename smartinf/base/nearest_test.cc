#include "smartinf/base/nearest.h"

#include <array>

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(EditDistance, CountsInsertionsDeletionsReplacementsAndSwaps) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("steps", "steps"), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("steps", "step"), 1u);
  EXPECT_EQ(edit_distance("steps", "steeps"), 1u);
  EXPECT_EQ(edit_distance("steps", "stops"), 1u);
  EXPECT_EQ(edit_distance("stpes", "steps"), 1u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
}

TEST(SameName, LooksPastCaseAndDashes) {
  EXPECT_TRUE(same_name("GPT2-4.0b", "gpt2_4.0B"));
  EXPECT_FALSE(same_name("gpt2-4.0B", "gpt2-4B"));
}

TEST(NearestName, FindsSlipsWrongSectionsAndCase) {
  constexpr std::array<std::string_view, 5> kNames{"train.steps", "train.seed", "model.layers",
                                                   "engine.io_size", "optimizer.beta1"};
  EXPECT_EQ(nearest_name("train.stpes", kNames), "train.steps");
  EXPECT_EQ(nearest_name("steps", kNames), "train.steps");
  EXPECT_EQ(nearest_name("train.layers", kNames), "model.layers");
  EXPECT_EQ(nearest_name("Train.Steps", kNames), "train.steps");
  EXPECT_EQ(nearest_name("engine.io-size", kNames), "engine.io_size");
  EXPECT_EQ(nearest_name("optimiser.beta1", kNames), "optimizer.beta1");
}

TEST(NearestName, PrefersALetterReplacedToOneLost) {
  constexpr std::array<std::string_view, 2> kNames{"gpt2-1.7B", "gpt2-16.6B"};
  EXPECT_EQ(nearest_name("gpt2-16.7B", kNames), "gpt2-16.6B");
}

TEST(NearestName, SaysNothingWhenNothingIsNear) {
  constexpr std::array<std::string_view, 2> kNames{"train", "doctor"};
  EXPECT_EQ(nearest_name("zebra", kNames), "");
  EXPECT_EQ(nearest_name("", kNames), "");
  EXPECT_EQ(nearest_name(std::string_view("x"), {}), "");
  EXPECT_EQ(nearest_name("doctr", kNames), "doctor");
}

}  // namespace
}  // namespace smartinf::base
