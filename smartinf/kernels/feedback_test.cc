#include "smartinf/kernels/feedback.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/units.h"

namespace smartinf::kernels {
namespace {

std::vector<base::Bf16> values_of(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> usual(0, 1);
  std::vector<base::Bf16> values(n);
  for (size_t i = 0; i < n; ++i) {
    const float tiny = i % 7 == 3 ? 1e-40f : 1.0f;  // denormals among them
    values[i] = base::to_bf16(i % 11 == 5 ? 0.0f : tiny * usual(random));
  }
  return values;
}

// Every length up to beyond four of the widest vectors, and around a group's end.
std::vector<size_t> lengths() {
  std::vector<size_t> all;
  for (size_t n = 0; n <= 4 * 32 + 1; ++n) all.push_back(n);
  for (size_t n = 250; n <= 260; ++n) all.push_back(n);
  all.push_back(5 * kMeanSquareElements + 77);
  return all;
}

TEST(Feedback, EveryTargetGivesTheSameBits) {
  const KernelTable& truth = *supported_tables().front();
  for (const size_t n : lengths()) {
    for (const size_t shift : {0ul, 1ul, 3ul}) {
      const auto gradient = values_of(n + shift, 1);
      const auto residual = values_of(n + shift, 2);
      const std::span g = std::span(gradient).subspan(shift);
      const size_t groups = base::divide_up(n, kMeanSquareElements);
      for (const bool feedback : {false, true}) {
        for (const bool squared : {false, true}) {
          const auto run = [&](const KernelTable& table) {
            std::vector<float> out(n + shift + 1, -7.0f);
            std::vector<float> squares(groups + 1, -7.0f);
            const auto r =
                feedback ? std::span(residual).subspan(shift) : std::span(residual).first(0);
            add_feedback(table, g, r, 0.37f, 0.9f, std::span(out).subspan(shift, n),
                         std::span(squares).first(squared ? groups : 0));
            EXPECT_EQ(out.back(), -7.0f);
            EXPECT_EQ(squares[squared ? groups : 0], -7.0f);
            out.insert(out.end(), squares.begin(), squares.end());
            return out;
          };
          const auto expected = run(truth);
          for (const KernelTable* table : supported_tables()) {
            const auto found = run(*table);
            ASSERT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)), 0)
                << table->isa() << " n " << n << " shift " << shift << " feedback " << feedback;
          }
        }
      }
    }
  }
}

TEST(Feedback, IsTheSumAndTheMeanSquare) {
  constexpr size_t kCount = 600;
  const auto gradient = values_of(kCount, 3);
  const auto residual = values_of(kCount, 4);
  std::vector<float> out(kCount);
  std::vector<float> squares(3);
  add_feedback(kernels(), gradient, residual, 0.5f, 0.25f, out, squares);
  std::vector<double> sums(3);
  for (size_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(out[i], 0.5f * base::to_f32(gradient[i]) + 0.25f * base::to_f32(residual[i]));
    sums[i / kMeanSquareElements] += std::pow(0.5 * base::to_f32(gradient[i]), 2);
  }
  for (size_t g = 0; g < 3; ++g) {
    const double mean = sums[g] / (g < 2 ? 256.0 : 88.0);
    EXPECT_NEAR(squares[g], mean, 1e-5 * mean);
  }
}

TEST(StepAhead, EveryTargetGivesTheSameBits) {
  const KernelTable& truth = *supported_tables().front();
  for (const size_t n : lengths()) {
    const auto residual = values_of(n, 5);
    const auto start = values_of(n, 6);
    for (const size_t phase : {0ul, 77ul, 255ul}) {
      std::vector<float> variances(base::divide_up(phase + n, kMeanSquareElements));
      for (size_t g = 0; g < variances.size(); ++g) {
        variances[g] = g % 3 == 2 ? 0.0f : 0.3f / static_cast<float>(g + 1);
      }
      for (const base::DataType type :
           {base::DataType::kF32, base::DataType::kBf16, base::DataType::kF16}) {
        const auto run = [&](const KernelTable& table) {
          std::vector<float> wide(n);
          table.cast_to_f32(start.data(), base::DataType::kBf16, wide.data(), n);
          std::vector<std::byte> weights(n * base::data_type_bytes(type));
          table.cast_from_f32(wide.data(), weights.data(), type, n);
          step_ahead(table, {.lr = 0.1f, .bias = 0.7f, .eps = 1e-8f}, residual, variances, phase,
                     weights.data(), type);
          return weights;
        };
        const auto expected = run(truth);
        for (const KernelTable* table : supported_tables()) {
          ASSERT_EQ(run(*table), expected) << table->isa() << " n " << n << " phase " << phase;
        }
      }
    }
  }
}

TEST(StepAhead, IsAStepOfWhatIsKeptWithinItsBound) {
  constexpr size_t kCount = 600;
  constexpr size_t kPhase = 100;
  const auto residual = values_of(kCount, 7);
  std::vector<float> weights(kCount, 1.0f);
  const std::vector<float> variances{0.5f, 2.0f, 0.0f};
  step_ahead(kernels(), {.lr = 0.01f, .bias = 0.5f, .eps = 1e-8f}, residual, variances, kPhase,
             weights.data(), base::DataType::kF32);
  size_t bounded = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const double v = variances[(kPhase + i) / kMeanSquareElements];
    const double steps = base::to_f32(residual[i]) / (std::sqrt(v / 0.5) + 1e-8);
    bounded += std::abs(steps) > kStepAheadMost ? 1 : 0;
    EXPECT_NEAR(weights[i], 1 - 0.01 * std::clamp<double>(steps, -kStepAheadMost, kStepAheadMost),
                1e-6);
  }
  EXPECT_GT(bounded, 0u);
  EXPECT_LT(bounded, kCount / 4);
  step_ahead(kernels(), {.lr = -0.01f, .bias = 0.5f, .eps = 1e-8f}, residual, variances, kPhase,
             weights.data(), base::DataType::kF32);
  for (const float weight : weights) EXPECT_NEAR(weight, 1, 1e-6);  // maximizing is the way back
}

TEST(StepAhead, GroupVariancesAreMeansOfTheFirst) {
  std::vector<float> variances(kMeanSquareElements + 3, 9.0f);
  for (size_t i = 0; i < kVarianceSamples; ++i) variances[i] = static_cast<float>(i);
  std::fill(variances.end() - 3, variances.end(), 5.0f);
  std::vector<float> groups(2);
  group_variances(variances, groups);
  EXPECT_EQ(groups, (std::vector<float>{(kVarianceSamples - 1) / 2.0f, 5.0f}));
}

}  // namespace
}  // namespace smartinf::kernels
