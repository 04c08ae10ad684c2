#include "smartinf/train/gradient_codec.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

namespace smartinf::train {
namespace {

using torch::Tensor;

StageCompression form(GradientForm form, uint32_t rank = 4) {
  return {form, rank, CompressWhen::kAlways, ErrorFeedback::kStep};
}

const std::vector<int64_t> kSizes{2, 25, 40};  // 50 rows

Tensor there_and_back(GradientCodec& codec, const StageCompression& options, const Tensor& values) {
  const Tensor bytes = codec.compress(values);
  EXPECT_EQ(static_cast<uint64_t>(bytes.numel()), compressed_bytes(options, kSizes));
  return decompress(options, bytes, kSizes, torch::kFloat32);
}

double error(const Tensor& a, const Tensor& b) {
  return (a - b).norm().item<double>() / b.norm().item<double>();
}

TEST(GradientCodec, AGradientOfLowRankLosesWhatItsTypeLoses) {
  torch::manual_seed(1);
  const Tensor values = torch::randn({50, 3}).mm(torch::randn({3, 40})).view(kSizes);
  GradientCodec codec(form(GradientForm::kLowRank));  // its fourth column is zero
  EXPECT_LT(error(there_and_back(codec, form(GradientForm::kLowRank), values), values), 0.005);
}

TEST(GradientCodec, IntegersLoseAtMostHalfOfTheirStep) {
  torch::manual_seed(1);
  const Tensor values = torch::randn(kSizes);
  for (const auto& [which, most] :
       {std::pair{GradientForm::kInt8, 127.0}, {GradientForm::kInt4, 7.0}}) {
    GradientCodec codec(form(which));
    const Tensor lost = (there_and_back(codec, form(which), values) - values).abs();
    EXPECT_LE(lost.max().item<double>(), 1.001 * values.abs().max().item<double>() / most / 2);
    EXPECT_GT(lost.max().item<double>(), 0);
    GradientCodec again(form(which));
    const Tensor zeros = torch::zeros(kSizes);
    EXPECT_TRUE(torch::equal(there_and_back(again, form(which), zeros), zeros));
  }
}

TEST(GradientCodec, WhatIsLostComesWithTheNextGradientOfTheStepAlone) {
  torch::manual_seed(1);
  for (const GradientForm which : {GradientForm::kLowRank, GradientForm::kInt4}) {
    const StageCompression options = form(which, 8);
    GradientCodec codec(options);
    const Tensor values = torch::randn(kSizes);
    const Tensor first = codec.compress(values);
    Tensor sum = decompress(options, first, kSizes, torch::kFloat32);
    for (int i = 1; i < 24; ++i) sum += there_and_back(codec, options, values);
    EXPECT_LT(error(sum / 24, values),
              0.3 * error(decompress(options, first, kSizes, torch::kFloat32), values));
    codec.begin_step();
    EXPECT_TRUE(torch::equal(codec.compress(values), first));
  }
}

TEST(GradientCodec, TheLastMicroBatchesOfAStepAreCompressed) {
  const StageCompression epilogue{GradientForm::kInt8, 16, CompressWhen::kEpilogue, {}};
  const auto count = [&](const StageCompression& options, uint32_t stage) {
    int compressed = 0;
    for (uint64_t i = 0; i < 16; ++i) compressed += is_compressed(options, 4, stage, 16, i) ? 1 : 0;
    return compressed;
  };
  // Optimus-CC's: 6 of 48.
  EXPECT_EQ(count(epilogue, 1) + count(epilogue, 2) + count(epilogue, 3), 6);
  EXPECT_EQ(count(epilogue, 3), 1);
  EXPECT_TRUE(is_compressed(epilogue, 4, 3, 16, 15));
  EXPECT_EQ(count(form(GradientForm::kInt8), 2), 16);
  EXPECT_EQ(count({}, 2), 0);
  const StageCompression exposed{GradientForm::kInt8, 16, CompressWhen::kExposed, {}, {},
                                 {0, 0, 5, 16}};
  EXPECT_EQ(count(exposed, 1), 0);
  EXPECT_EQ(count(exposed, 2), 5);
  EXPECT_TRUE(is_compressed(exposed, 4, 2, 16, 11));
  EXPECT_EQ(count(exposed, 3), 16);
}

}  // namespace
}  // namespace smartinf::train
