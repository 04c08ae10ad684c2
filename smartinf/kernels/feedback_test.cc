#include "smartinf/kernels/feedback.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/units.h"
#include "smartinf/kernels/selection.h"

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
  all.push_back(5 * kSquaresGroup + 77);
  return all;
}

TEST(Feedback, EveryTargetGivesTheSameBits) {
  const KernelTable& truth = *supported_tables().front();
  for (const size_t n : lengths()) {
    for (const size_t shift : {0ul, 1ul, 3ul}) {
      const auto gradient = values_of(n + shift, 1);
      const auto residual = values_of(n + shift, 2);
      for (const bool feedback : {false, true}) {
        const auto run = [&](const KernelTable& table) {
          std::vector<float> out(n + shift + 1, -7.0f);
          const auto r =
              feedback ? std::span(residual).subspan(shift) : std::span(residual).first(0);
          add_feedback(table, std::span(gradient).subspan(shift), r, 0.37f,
                       std::span(out).subspan(shift, n));
          EXPECT_EQ(out.back(), -7.0f);
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

struct Sums {
  std::vector<float> rows;
  std::vector<float> columns;
};

TEST(MatrixSquares, EveryTargetGivesTheSameBits) {
  for (const size_t columns : lengths()) {
    for (const size_t rows : {0ul, 1ul, 3ul, 4ul, 5ul, 11ul}) {
      auto matrix = values_of(rows * columns + 1, 8);
      if (matrix.size() > 300) matrix[300] = base::to_bf16(3e30f);  // whose square is NaN
      const auto run = [&](const KernelTable& table) {
        // Sums are added to what is there.
        Sums sums{std::vector<float>(rows + 1, 0.5f), std::vector<float>(columns + 1, 0.25f)};
        add_matrix_squares(table, std::span(matrix).subspan(1), 0.37f,
                           std::span(sums.rows).first(rows),
                           std::span(sums.columns).first(columns));
        EXPECT_EQ(sums.rows.back(), 0.5f);
        EXPECT_EQ(sums.columns.back(), 0.25f);
        return sums;
      };
      const Sums expected = run(*supported_tables().front());
      for (const KernelTable* table : supported_tables()) {
        const Sums found = run(*table);
        ASSERT_EQ(found.rows, expected.rows) << table->isa() << " " << rows << " x " << columns;
        ASSERT_EQ(found.columns, expected.columns)
            << table->isa() << " " << rows << " x " << columns;
      }
    }
  }
}

TEST(MatrixSquares, AreSumsByRowAndColumn) {
  constexpr size_t kRows = 37;
  constexpr size_t kColumns = 301;
  const auto matrix = values_of(kRows * kColumns, 9);
  std::vector<float> rows(kRows);
  std::vector<float> columns(kColumns);
  add_matrix_squares(kernels(), matrix, 0.5f, rows, columns);
  std::vector<double> expected_rows(kRows);
  std::vector<double> expected_columns(kColumns);
  for (size_t i = 0; i < matrix.size(); ++i) {
    const double square = std::pow(0.5 * base::to_f32(matrix[i]), 2);
    expected_rows[i / kColumns] += square;
    expected_columns[i % kColumns] += square;
  }
  // Squares of denormals are 0.
  for (size_t r = 0; r < kRows; ++r) EXPECT_NEAR(rows[r], expected_rows[r], 1e-5 * rows[r]);
  for (size_t c = 0; c < kColumns; ++c) {
    EXPECT_NEAR(columns[c], expected_columns[c], 1e-5 * columns[c] + 1e-40);
  }
}

TEST(Feedback, CopiesAndSumsSquares) {
  for (const size_t n : lengths()) {
    const auto values = values_of(n + 1, 3);
    const auto in = std::span(values).subspan(1);
    double expected = 0;
    for (const base::Bf16 value : in) expected += std::pow(base::to_f32(value), 2);
    const double truth = copy_squares(*supported_tables().front(), in, nullptr);
    EXPECT_NEAR(truth, expected, 1e-5 * expected);
    for (const KernelTable* table : supported_tables()) {
      std::vector<base::Bf16> out(n + 1, base::Bf16{0x4321});
      EXPECT_EQ(copy_squares(*table, in, out.data()), truth) << table->isa() << " n " << n;
      EXPECT_EQ(n == 0 ? 0 : std::memcmp(out.data(), in.data(), n * sizeof(base::Bf16)), 0);
      EXPECT_EQ(out.back().bits, 0x4321);
    }
  }
}

TEST(Feedback, SumsSquaresThatAnF32DoesNotHold) {
  for (const float size : {1e-22f, 1e-17f, 1e15f, 1e19f, 3e38f}) {
    const std::vector<base::Bf16> values(600, base::to_bf16(size));
    const double expected = 600 * std::pow(base::to_f32(values[0]), 2);
    const double truth = copy_squares(*supported_tables().front(), values, nullptr);
    EXPECT_NEAR(truth, expected, 1e-5 * expected);
    for (const KernelTable* table : supported_tables()) {
      EXPECT_EQ(copy_squares(*table, values, nullptr), truth) << table->isa();
    }
  }
}

TEST(Feedback, IsTheSum) {
  constexpr size_t kCount = 600;
  const auto gradient = values_of(kCount, 3);
  const auto residual = values_of(kCount, 4);
  std::vector<float> out(kCount);
  add_feedback(kernels(), gradient, residual, 0.5f, out);
  for (size_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(out[i], 0.5f * base::to_f32(gradient[i]) + base::to_f32(residual[i]));
  }
}

std::vector<float> roots_of(size_t n) {
  std::vector<float> roots(n);
  for (size_t i = 0; i < n; ++i)
    roots[i] = i % 31 == 7 ? 0.0f : 0.3f + 0.01f * static_cast<float>(i % 97);
  return roots;
}

TEST(StepAhead, EveryTargetGivesTheSameBits) {
  const KernelTable& truth = *supported_tables().front();
  for (const size_t n : lengths()) {
    auto residual = values_of(n, 5);
    const auto start = values_of(n, 6);
    auto roots = roots_of(n);
    // A NaN stays NaN, wherever in a vector it lies.
    for (size_t i = 0; i < n; i += 19) residual[i] = base::Bf16{0x7fc0};
    for (size_t i = 3; i < n; i += 23) residual[i] = base::Bf16{0xff80};  // -infinity
    for (size_t i = 5; i < n; i += 29) roots[i] = std::numeric_limits<float>::infinity();
    for (const float root : {1.0f, 0.01f, 0.0f}) {
      for (const base::DataType type :
           {base::DataType::kF32, base::DataType::kBf16, base::DataType::kF16}) {
        const auto run = [&](const KernelTable& table) {
          std::vector<float> wide(n);
          table.cast_to_f32(start.data(), base::DataType::kBf16, wide.data(), n);
          std::vector<std::byte> weights(n * base::data_type_bytes(type));
          table.cast_from_f32(wide.data(), weights.data(), type, n);
          step_ahead(table, {.lr = 0.1f, .bias = 0.7f, .eps = 1e-8f}, residual, root, roots,
                     weights.data(), type);
          return weights;
        };
        const auto expected = run(truth);
        for (const KernelTable* table : supported_tables()) {
          ASSERT_EQ(run(*table), expected) << table->isa() << " n " << n << " root " << root;
        }
      }
    }
  }
}

TEST(StepAhead, IsAStepOfWhatIsKeptWithinItsBound) {
  constexpr size_t kCount = 3000;
  const auto residual = values_of(kCount, 7);
  const auto roots = roots_of(kCount);
  std::vector<float> weights(kCount, 1.0f);
  step_ahead(kernels(), {.lr = 0.01f, .bias = 0.5f, .eps = 1e-8f}, residual, 0.75f, roots,
             weights.data(), base::DataType::kF32);
  size_t bounded = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const double root = 0.75 * roots[i] / std::sqrt(0.5) + 1e-8;
    const double steps = base::to_f32(residual[i]) / root;
    bounded += std::abs(steps) > kStepAheadMost ? 1 : 0;
    EXPECT_NEAR(weights[i], 1 - 0.01 * std::clamp<double>(steps, -kStepAheadMost, kStepAheadMost),
                1e-6);
  }
  EXPECT_GT(bounded, 0u);
  EXPECT_LT(bounded, kCount / 4);
  step_ahead(kernels(), {.lr = -0.01f, .bias = 0.5f, .eps = 1e-8f}, residual, 0.75f, roots,
             weights.data(), base::DataType::kF32);
  for (const float weight : weights) EXPECT_NEAR(weight, 1, 1e-6);  // maximizing is the way back
}

TEST(StepAhead, LeavesAWeightWhereNothingIsKeptAndNothingIsKnown) {
  const std::vector<base::Bf16> residual(40);
  const std::vector<float> roots(40);
  for (const KernelTable* table : supported_tables()) {
    std::vector<float> weights(40, 1.0f);
    step_ahead(*table, {.lr = 0.01f, .bias = 0.5f, .eps = 0}, residual, 0, roots, weights.data(),
               base::DataType::kF32);
    EXPECT_EQ(weights, std::vector<float>(40, 1.0f)) << table->isa();
  }
}

}  // namespace
}  // namespace smartinf::kernels
