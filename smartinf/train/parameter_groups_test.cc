#include "smartinf/train/parameter_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/train/model_source.h"

namespace smartinf::train {
namespace {

using ::testing::HasSubstr;

plan::ParameterSpace small_space() {
  ModelOptions model;
  model.layers = 2;
  model.vocabulary = 256;
  return model::make_parameter_space(architecture_of(model, 16)).value();
}

ParameterGroup group_of(const GroupedParameters& grouped, std::string_view name) {
  return grouped.groups.at(grouped.space.find(name)->group);
}

TEST(ParameterGroups, PatternsFitWholeNames) {
  EXPECT_TRUE(matches("a.b", "a.b"));
  EXPECT_FALSE(matches("a.b", "a.b.c"));
  EXPECT_FALSE(matches("b", "a.b"));
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("*.b", "a.b.b"));
  EXPECT_TRUE(matches("a*c*e", "abcde"));
  EXPECT_FALSE(matches("a*c*e", "abcd"));
  EXPECT_TRUE(matches("layers.?.q", "layers.3.q"));
  EXPECT_FALSE(matches("layers.?.q", "layers.33.q"));
  EXPECT_TRUE(matches("layers.[0-3].q", "layers.3.q"));
  EXPECT_FALSE(matches("layers.[0-3].q", "layers.4.q"));
  EXPECT_TRUE(matches("*.q", ".q"));  // dots and slashes are characters like others
  EXPECT_TRUE(matches("a*", "a/b"));
  EXPECT_TRUE(matches("a\\*", "a\\b"));
}

TEST(ParameterGroups, WithoutPatternsMatricesDecay) {
  const plan::ParameterSpace space = small_space();
  const GroupedParameters grouped = group_parameters(space, {}).value();
  EXPECT_EQ(grouped.space.digest(), space.digest());  // states of runs without patterns stay theirs
  EXPECT_EQ(group_of(grouped, "model.layers.0.mlp.up_proj.weight").weight_decay, 0.1);
  EXPECT_EQ(group_of(grouped, "model.norm.weight").weight_decay, 0);
  EXPECT_EQ(group_of(grouped, "model.norm.weight").lr_factor, 1);
}

TEST(ParameterGroups, TheLastPatternThatFitsCounts) {
  TrainOptions train;
  train.weight_decay = 0.2;
  train.lr_factors = {"*.mlp.* = 2", "model.layers.1.mlp.up_proj.weight=3"};
  train.weight_decays = {"model.embed_tokens.weight = 0", "*norm.weight = 0.5"};
  const GroupedParameters grouped = group_parameters(small_space(), train).value();
  EXPECT_EQ(group_of(grouped, "model.layers.0.mlp.up_proj.weight").lr_factor, 2);
  EXPECT_EQ(group_of(grouped, "model.layers.1.mlp.up_proj.weight").lr_factor, 3);
  EXPECT_EQ(group_of(grouped, "model.layers.1.mlp.up_proj.weight").weight_decay, 0.2);
  EXPECT_EQ(group_of(grouped, "model.embed_tokens.weight").weight_decay, 0);
  EXPECT_EQ(group_of(grouped, "model.embed_tokens.weight").lr_factor, 1);
  EXPECT_EQ(group_of(grouped, "model.layers.0.input_layernorm.weight").weight_decay, 0.5);
  EXPECT_EQ(grouped.groups.size(), 6u);  // matrices, vectors, and one for each pattern

  // Other numbers, the same groups: a run may go on with them.
  train.lr_factors = {"*.mlp.* = 1", "model.layers.1.mlp.up_proj.weight=1"};
  const GroupedParameters again = group_parameters(small_space(), train).value();
  EXPECT_EQ(again.space.digest(), grouped.space.digest());
}

struct Bad {
  const char* entry;
  const char* message;
};

class BadPattern : public ::testing::TestWithParam<Bad> {};

TEST_P(BadPattern, IsExplained) {
  Options options;
  options.train.run = "runs/a";
  options.train.weight_decays = {"*norm.weight = 0", GetParam().entry};
  const base::Status status = validate(options);
  ASSERT_EQ(status.code(), base::ErrorCode::kInvalidArgument);
  EXPECT_THAT(status.to_string(), HasSubstr("train.weight_decays"));
  EXPECT_THAT(status.to_string(), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    All, BadPattern,
    ::testing::Values(Bad{"", "PATTERN = NUMBER"}, Bad{"*norm.weight", "PATTERN = NUMBER"},
                      Bad{"= 1", "PATTERN = NUMBER"}, Bad{"*norm.weight = -1", "from 0"},
                      Bad{"*norm.weight = nan", "from 0"}, Bad{"*norm.weight = 0x", "from 0"},
                      Bad{"model.embed_token.weight = 0",
                          "Did you mean model.embed_tokens.weight?"},
                      Bad{"*.input_layernrom.* = 0", "Did you mean input_layernorm?"},
                      Bad{"bias = 0", "such as model.norm.weight"}));

}  // namespace
}  // namespace smartinf::train
