#include "smartinf/kernels/feedback.h"

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

}  // namespace
}  // namespace smartinf::kernels
