#include "smartinf/compress/second_moment_factors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>

#include <gtest/gtest.h>

#include "smartinf/base/state_format.h"

namespace smartinf::compress {
namespace {

using base::kBlockElements;

plan::ParameterSpace test_space() {
  plan::ParameterSpace space;
  EXPECT_TRUE(space.add("wide", {50, 4001}, 0).ok());
  EXPECT_TRUE(space.add("norm", {300}, 1).ok());
  EXPECT_TRUE(space.add("tall", {3000, 37}, 0).ok());
  return space;
}

/// Squares that are a product of row and column in every matrix, in each its own.
std::vector<base::Bf16> gradient_of(const plan::ParameterSpace& space) {
  std::mt19937 random(5);
  std::vector<base::Bf16> gradient(space.count());
  for (const MatrixLayout& matrix : matrix_layouts(space)) {
    std::vector<float> columns(matrix.columns);
    for (float& column : columns) column = static_cast<float>(1 + random() % 15);
    for (uint64_t i = 0; i < matrix.count(); ++i) {
      const uint64_t row = i / matrix.columns;
      // At most eight bits: nothing is rounded.
      const float size = static_cast<float>(1 + row * 7 % 15) * columns[i % matrix.columns];
      gradient[matrix.first + i] = base::to_bf16(random() % 2 == 0 ? size : -size);
    }
  }
  return gradient;
}

/// The square of every element as computed from the factors of its subgroup's message.
std::vector<float> squares_of(const SecondMomentFactors& second_moment,
                              const plan::ParameterSpace& space, uint64_t subgroup_elements) {
  std::vector<float> all(space.count());
  for (const plan::Subgroup& subgroup : space.subgroups(subgroup_elements)) {
    RowColumnFactors appended{.values = {-7.0f}, .runs = {1}};  // behind what is there
    second_moment.append(subgroup, appended);
    const std::vector<float>& factors = appended.values;
    EXPECT_EQ(factors.front(), -7.0f);
    EXPECT_EQ(std::accumulate(appended.runs.begin(), appended.runs.end(), size_t{0}),
              factors.size());
    EXPECT_EQ(factors.size(),
              1 + factors_in(second_moment.matrices(), subgroup.first, subgroup.count));
    uint64_t at = 1;
    for (const MatrixLayout& matrix :
         matrices_in(second_moment.matrices(), subgroup.first, subgroup.count)) {
      const MatrixPart part = part_of(matrix, subgroup.first, subgroup.count);
      float* out = all.data() + part.first;
      part.each_row([&](uint64_t row, uint64_t column, uint64_t count) {
        for (uint64_t i = 0; i < count; ++i) {
          *out++ = factors[at + row] * factors[at + part.rows() + column + i];
        }
      });
      at += part.factors();
    }
  }
  return all;
}

TEST(SecondMomentFactors, AreExactWhereTheyAreAProduct) {
  const plan::ParameterSpace space = test_space();
  const auto gradient = gradient_of(space);
  SecondMomentFactors second_moment(matrix_layouts(space));
  base::ThreadTeam team(1, "test");
  second_moment.find(gradient.data(), 0.5f, {}, team);
  const auto found = squares_of(second_moment, space, kBlockElements);
  for (uint64_t i = 0; i < found.size(); ++i) {
    const double square = std::pow(0.5 * base::to_f32(gradient[i]), 2);
    ASSERT_NEAR(found[i], square, 1e-4 * square) << i;  // of thousands summed in f32
  }
}

TEST(SecondMomentFactors, DoNotDependOnThreadsOrSubgroups) {
  const plan::ParameterSpace space = test_space();
  const auto gradient = gradient_of(space);
  SecondMomentFactors second_moment(matrix_layouts(space));
  base::ThreadTeam alone(1, "test");
  second_moment.find(gradient.data(), 0.3f, {}, alone);
  const auto expected = squares_of(second_moment, space, kBlockElements);
  for (const uint32_t threads : {2u, 5u}) {
    base::ThreadTeam team(threads, "test");
    // Again: nothing is left of the time before.
    second_moment.find(gradient.data(), 0.3f, {}, team);
    EXPECT_EQ(squares_of(second_moment, space, 2 * kBlockElements), expected) << threads;
    EXPECT_EQ(squares_of(second_moment, space, 100 * kBlockElements), expected) << threads;
  }
}

TEST(SecondMomentFactors, OfTallMatricesAreSummedInSections) {
  // Nine sections of 2^22 elements and a piece.
  plan::ParameterSpace space;
  ASSERT_TRUE(space.add("tall", {40'000, 1000}, 0).ok());
  std::vector<base::Bf16> gradient(space.count());
  for (uint64_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = base::to_bf16(i % 1000 == 7 ? 2.0f : 1.0f);
  }
  std::optional<std::vector<float>> first;
  for (const uint32_t threads : {1u, 3u}) {
    SecondMomentFactors second_moment(matrix_layouts(space));
    base::ThreadTeam team(threads, "test");
    second_moment.find(gradient.data(), 1, {}, team);
    RowColumnFactors appended;
    second_moment.append({base::SubgroupId{0}, 0, space.count()}, appended);
    const std::vector<float>& factors = appended.values;
    if (!first) first = factors;
    EXPECT_EQ(factors, *first);
  }
  EXPECT_NEAR((*first)[39'999] * (*first)[40'007], 4.0, 1e-4);
  EXPECT_NEAR((*first)[39'999] * (*first)[40'008], 1.0, 1e-4);
}

TEST(SecondMomentFactors, OfGroupsThatSitOutAreNone) {
  const plan::ParameterSpace space = test_space();
  auto gradient = gradient_of(space);
  std::vector<plan::GroupSpan> out = space.spans(0, space.count());
  std::erase_if(out, [](const plan::GroupSpan& span) { return span.group == 0; });
  const plan::ParameterRange& norm = *space.find("norm");
  std::fill_n(gradient.begin() + static_cast<ptrdiff_t>(norm.first), norm.count,
              base::to_bf16(std::numeric_limits<float>::quiet_NaN()));  // whatever lies there
  SecondMomentFactors second_moment(matrix_layouts(space));
  base::ThreadTeam team(2, "test");
  second_moment.find(gradient.data(), 1, out, team);
  const auto found = squares_of(second_moment, space, kBlockElements);
  for (uint64_t i = 0; i < found.size(); ++i) {
    const bool skipped = i >= norm.first && i < norm.first + norm.count;
    ASSERT_EQ(found[i] == 0, skipped) << i;
  }
}

/// A gradient that is no number, or beyond f32, leaves no factor that a message could not hold.
TEST(SecondMomentFactors, AreNumbersWhateverTheGradientIs) {
  plan::ParameterSpace space;
  ASSERT_TRUE(space.add("matrix", {60, 50}, 0).ok());
  for (const float odd : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(), 3e38f, 1e-30f, 0.0f}) {
    std::vector<base::Bf16> gradient(space.count(), base::to_bf16(odd == 0 ? 0.0f : 1e-3f));
    gradient[123] = base::to_bf16(odd);
    SecondMomentFactors second_moment(matrix_layouts(space));
    base::ThreadTeam team(1, "test");
    second_moment.find(gradient.data(), 1, {}, team);
    RowColumnFactors appended;
    second_moment.append({base::SubgroupId{0}, 0, space.count()}, appended);
    const std::vector<float>& factors = appended.values;
    for (const float factor : factors) ASSERT_GE(factor, 0) << odd;
    if (odd != 0) continue;
    for (size_t i = 0; i < factors.size(); ++i) EXPECT_EQ(factors[i], i < 60 ? 0.0f : 1.0f);
  }
}

/// Rows and columns whose means are far apart: what a message says of an element does not depend on
/// what else its subgroup holds.
TEST(SecondMomentFactors, ReadTheSameFromAnySubgroup) {
  constexpr uint64_t kRows = 2048;
  constexpr uint64_t kColumns = 512;
  plan::ParameterSpace space;
  ASSERT_TRUE(space.add("matrix", {kRows, kColumns}, 0).ok());
  std::vector<base::Bf16> gradient(space.count());
  for (uint64_t i = 0; i < gradient.size(); ++i) {
    const uint64_t size = i / kColumns / 64 + i % kColumns / 16;
    gradient[i] = base::to_bf16(std::ldexp(1.0f, -static_cast<int>(size)));
  }
  SecondMomentFactors second_moment(matrix_layouts(space));
  base::ThreadTeam team(1, "test");
  second_moment.find(gradient.data(), 1, {}, team);
  std::optional<std::vector<float>> expected;
  for (const uint64_t elements : {space.count(), 3 * kBlockElements, kBlockElements}) {
    std::vector<float> read(kRows + kColumns);
    for (const plan::Subgroup& subgroup : space.subgroups(elements)) {
      RowColumnFactors factors;
      second_moment.append(subgroup, factors);
      CompressedWriter writer;
      writer.begin(subgroup.id, subgroup.count, ValueEncoding::kSign, factors);
      for (uint64_t first = 0; first < subgroup.count; first += kBlockElements) {
        writer.add_block({}, {});
      }
      const auto view = CompressedView::parse(writer.finish());
      ASSERT_TRUE(view.ok()) << view.status().to_string();
      const uint64_t rows = factors.runs[0];
      view->read_factors(0, 0, std::span(read).subspan(subgroup.first / kColumns, rows));
      std::vector<float> columns(kColumns);
      view->read_factors(1, rows, columns);
      const auto before = std::span(read).subspan(kRows);
      if (subgroup.first > 0) {
        ASSERT_TRUE(std::equal(columns.begin(), columns.end(), before.begin()));
      }
      std::copy(columns.begin(), columns.end(), before.begin());
    }
    if (!expected) expected = read;
    ASSERT_EQ(read, *expected) << elements;
  }
  EXPECT_GT(*std::min_element(expected->begin(), expected->end()), 0.0f);
}

}  // namespace
}  // namespace smartinf::compress
