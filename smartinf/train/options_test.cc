#include "smartinf/train/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::train {
namespace {

using ::testing::HasSubstr;

TEST(Options, DefaultsAreValid) {
  Options options;
  options.train.run = "runs/a";
  EXPECT_TRUE(validate(options).ok()) << validate(options).to_string();
}

TEST(Options, DerivedSizes) {
  ModelOptions model;
  model.width = 256;
  model.heads = 4;
  const ModelOptions full = with_defaults(model);
  EXPECT_EQ(full.kv_heads, 4u);
  EXPECT_EQ(full.mlp_width, 704u);  // 682.67, up to a multiple of 64
}

TEST(Options, EvaluationSetsMayHaveSeveralPaths) {
  DataOptions data;
  data.evaluation = {"chat = a b.bin", "code=c=d.bin", " chat = e.bin "};
  const auto sets = evaluation_sets(data);
  ASSERT_TRUE(sets.ok()) << sets.status().to_string();
  ASSERT_EQ(sets->size(), 2u);
  EXPECT_EQ((*sets)[0].name, "chat");
  EXPECT_EQ((*sets)[0].paths, (std::vector<std::string>{"a b.bin", "e.bin"}));
  EXPECT_EQ((*sets)[1].paths, (std::vector<std::string>{"c=d.bin"}));
}

struct BadModel {
  void (*spoil)(Options&);
  const char* key;
};

class BadOption : public ::testing::TestWithParam<BadModel> {};

TEST_P(BadOption, IsNamedByItsKey) {
  Options options;
  options.train.run = "runs/a";
  GetParam().spoil(options);
  const base::Status status = validate(options);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.code(), base::ErrorCode::kInvalidArgument);
  EXPECT_THAT(status.to_string(), HasSubstr(GetParam().key));
  EXPECT_FALSE(status.advice().empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, BadOption,
    ::testing::Values(
        BadModel{[](Options& o) { o.model.heads = 3; }, "model.heads"},
        BadModel{[](Options& o) { o.model.heads = 256; }, "model.heads"},  // heads of one element
        BadModel{[](Options& o) { o.model.heads = 0; }, "model.heads"},
        BadModel{[](Options& o) { o.model.kv_heads = 3; }, "model.kv_heads"},
        BadModel{[](Options& o) { o.model.kv_heads = 8; }, "model.kv_heads"},
        BadModel{[](Options& o) { o.model.layers = 0; }, "model.layers"},
        BadModel{[](Options& o) { o.model.width = ~0u; }, "model.width"},
        BadModel{[](Options& o) { o.data.paths.clear(); }, "data.paths"},
        BadModel{[](Options& o) { o.data.sequence = 0; }, "data.sequence"},
        BadModel{[](Options& o) { o.data.validation_share = -1; }, "data.validation_share"},
        BadModel{[](Options& o) { o.data.evaluation = {"chat.bin"}; }, "data.evaluation"},
        BadModel{[](Options& o) {
                   o.data.evaluation = {"a = x", "= y"};
                 },
                 "data.evaluation"},
        BadModel{[](Options& o) { o.train.steps = 0; }, "train.steps"},
        BadModel{[](Options& o) { o.train.epochs = 2; }, "train.epochs"},  // and steps, too
        BadModel{[](Options& o) { o.train.epochs = -1; }, "train.epochs"},
        BadModel{[](Options& o) { o.train.decay_share = 2; }, "train.decay_share"},
        BadModel{[](Options& o) { o.train.micro_batch = 0; }, "train.micro_batch"},
        BadModel{[](Options& o) { o.train.lr = 0; }, "train.lr"},
        BadModel{[](Options& o) { o.train.lr = 0.0 / 0.0; }, "train.lr"},
        BadModel{[](Options& o) { o.train.lr_floor = 2; }, "train.lr_floor"},
        BadModel{[](Options& o) { o.train.accelerator = "gpu"; }, "train.accelerator"},
        BadModel{[](Options& o) { o.ranks.timeout_s = 0; }, "ranks.timeout"},
        BadModel{[](Options& o) { o.train.run.clear(); }, "train.run"}));

}  // namespace
}  // namespace smartinf::train
