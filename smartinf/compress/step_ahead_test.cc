#include "smartinf/compress/step_ahead.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "smartinf/base/state_format.h"

namespace smartinf::compress {
namespace {

using base::kBlockElements;

plan::ParameterSpace step_space() {
  plan::ParameterSpace space;
  EXPECT_TRUE(space.add("first", {500, 401}, 0).ok());  // reaches into the fourth block
  EXPECT_TRUE(space.add("norm", {300}, 1).ok());
  EXPECT_TRUE(space.add("second", {100, 1000}, 0).ok());
  return space;
}

struct Model {
  explicit Model(const plan::ParameterSpace& space)
      : variances(space.count()), residual(space.count()) {
    std::mt19937 random(5);
    for (const MatrixLayout& matrix : matrix_layouts(space)) {
      for (uint64_t i = 0; i < matrix.count(); ++i) {
        // Products of few bits: nothing is rounded.
        variances[matrix.first + i] = static_cast<float>(1 + i / matrix.columns % 7) *
                                      static_cast<float>(1 + i % matrix.columns % 13) * 0x1p-10f;
      }
    }
    for (base::Bf16& kept : residual) {
      kept = base::to_bf16(static_cast<float>(random() % 1000) * 1e-4f - 0.05f);
    }
  }
  std::vector<float> variances;
  std::vector<base::Bf16> residual;
  std::vector<kernels::StepAhead> rates = {{.lr = 0.01f, .bias = 0.5f, .eps = 1e-6f},
                                           {.lr = 0.02f, .bias = 0.5f, .eps = 1e-6f}};
  StepAheadWeights::Step step() const { return {residual.data(), rates}; }
};

TEST(StepAheadWeights, StepByTheRootsOfVariancesThatAreProducts) {
  const plan::ParameterSpace space = step_space();
  const Model model(space);
  StepAheadWeights ahead(matrix_layouts(space), space, space.subgroups(kBlockElements));
  ahead.take(0, model.variances);
  std::vector<float> weights(space.count(), 1.0f);
  ahead.step(model.step(), 0, space.count(), weights.data(), base::DataType::kF32);
  for (uint64_t i = 0; i < space.count(); ++i) {
    const kernels::StepAhead& rate = model.rates[space.at(i).group];
    const double root = std::sqrt(model.variances[i] / rate.bias) + rate.eps;
    const double steps = std::clamp(base::to_f32(model.residual[i]) / root, -4.0, 4.0);
    ASSERT_NEAR(weights[i], 1 - rate.lr * steps, 3e-7) << i;
  }
}

/// Weights step when the last subgroup of each matrix they lie in has come, in whatever order.
TEST(StepAheadWeights, WaitForAllSamplesOfAMatrix) {
  const plan::ParameterSpace space = step_space();
  const Model model(space);
  const auto subgroups = space.subgroups(kBlockElements);
  ASSERT_EQ(subgroups.size(), 5u);
  StepAheadWeights whole(matrix_layouts(space), space, subgroups);
  whole.take(0, model.variances);
  std::vector<float> expected(space.count(), 1.0f);
  whole.step(model.step(), 0, space.count(), expected.data(), base::DataType::kF32);
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    StepAheadWeights ahead(matrix_layouts(space), space, subgroups);
    std::vector<float> weights(space.count(), 1.0f);
    // Subgroup 4 holds nothing but the second matrix.
    const bool all = round % 2 == 0;
    ahead.expect(std::vector<uint8_t>{1, 1, 1, 1, all});
    if (!all)
      ahead.take(subgroups[4].first, std::span(model.variances).subspan(subgroups[4].first));
    std::vector<size_t> order = {0, 1, 2, 3};
    if (all) order.push_back(4);
    std::shuffle(order.begin(), order.end(), random);
    std::set<size_t> come;
    std::set<size_t> ready;
    for (const size_t i : order) {
      const plan::Subgroup& own = subgroups[i];
      ahead.take(own.first, std::span(model.variances).subspan(own.first, own.count));
      come.insert(i);
      ahead.arrived(model.step(), i, weights.data() + own.first, base::DataType::kF32,
                    [&](size_t done) { EXPECT_TRUE(ready.insert(done).second) << done; });
      const bool first =
          come.contains(0) && come.contains(1) && come.contains(2) && come.contains(3);
      const bool second = come.contains(3) && (come.contains(4) || !all);
      EXPECT_EQ(ready.contains(0), first);
      EXPECT_EQ(ready.contains(3), first && second);
      EXPECT_EQ(ready.contains(4), second && all);
    }
    EXPECT_EQ(ready, come);
    const auto end = static_cast<ptrdiff_t>(all ? space.count() : subgroups[4].first);
    EXPECT_TRUE(std::equal(weights.begin(), weights.begin() + end, expected.begin()));
    for (auto i = end; i < static_cast<ptrdiff_t>(weights.size()); ++i) {
      ASSERT_EQ(weights[static_cast<size_t>(i)], 1.0f);
    }
  }
}

TEST(StepAheadWeights, TakeColumnsForAlikeWhereNoSampleTells) {
  plan::ParameterSpace space;
  ASSERT_TRUE(space.add("matrix", {1000, 500}, 0).ok());
  const auto matrices = matrix_layouts(space);
  const MatrixSamples samples{matrices.front()};
  std::set<uint64_t> sampled;
  for (uint64_t s = 0; s < samples.sampled_rows(); ++s) sampled.insert(samples.row(s));
  std::vector<float> variances(space.count());
  for (uint64_t i = 0; i < variances.size(); ++i) {
    variances[i] = sampled.contains(i / 500) ? 0.0f : 0.25f;
  }
  const std::vector<base::Bf16> residual(space.count(), base::to_bf16(0.5f));
  const std::vector<kernels::StepAhead> rates = {{.lr = 0.01f, .bias = 1, .eps = 0}};
  StepAheadWeights ahead(matrices, space, space.subgroups(kBlockElements));
  ahead.take(0, variances);
  std::vector<float> weights(space.count());
  ahead.step({residual.data(), rates}, 0, space.count(), weights.data(), base::DataType::kF32);
  for (uint64_t i = 0; i < weights.size(); ++i) {
    // A row of zeros divides by next to nothing: as far as a step goes.
    ASSERT_FLOAT_EQ(weights[i], sampled.contains(i / 500) ? -0.04f : -0.01f) << i;
  }
}

}  // namespace
}  // namespace smartinf::compress
