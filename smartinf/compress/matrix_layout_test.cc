#include "smartinf/compress/matrix_layout.h"

#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

namespace smartinf::compress {
namespace {

struct Shape {
  uint64_t rows, columns;
  bool operator==(const Shape&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  return out << shape.rows << " x " << shape.columns;
}

std::vector<MatrixLayout> matrices_of(const std::vector<std::vector<uint64_t>>& shapes) {
  plan::ParameterSpace space;
  for (const auto& shape : shapes) {
    EXPECT_TRUE(space.add("range." + std::to_string(space.ranges().size()), shape, 0).ok());
  }
  const auto matrices = matrix_layouts(space);
  // In order, without gaps, each within its range.
  uint64_t first = 0;
  for (const MatrixLayout& matrix : matrices) {
    EXPECT_EQ(matrix.first, first);
    const plan::ParameterRange& range = space.ranges()[matrix.range];
    EXPECT_GE(matrix.first, range.first);
    EXPECT_LE(matrix.end(), range.first + range.count);
    first = matrix.end();
  }
  EXPECT_EQ(first, space.count());
  return matrices;
}

std::vector<Shape> shapes_of(const std::vector<uint64_t>& shape) {
  std::vector<Shape> shapes;
  for (const MatrixLayout& matrix : matrices_of({shape}))
    shapes.push_back({matrix.rows, matrix.columns});
  return shapes;
}

TEST(MatrixForms, AreOfTheShape) {
  EXPECT_EQ(shapes_of({4096, 1024}), (std::vector<Shape>{{4096, 1024}}));
  EXPECT_EQ(shapes_of({}), (std::vector<Shape>{{1, 1}}));
  EXPECT_EQ(shapes_of({768}), (std::vector<Shape>{{1, 768}}));
  EXPECT_EQ(shapes_of({1, 768}), (std::vector<Shape>{{1, 768}}));
  EXPECT_EQ(shapes_of({50304, 768}), (std::vector<Shape>{{50304, 768}}));
  // A convolution: what is left of it when rows and columns are fewest.
  EXPECT_EQ(shapes_of({256, 128, 3, 3}), (std::vector<Shape>{{256, 1152}}));
  // Experts have rows and columns of their own.
  EXPECT_EQ(shapes_of({3, 1024, 2048}), (std::vector<Shape>(3, {1024, 2048})));
  EXPECT_EQ(shapes_of({3, 2, 1024, 1024}), (std::vector<Shape>(6, {1024, 1024})));
  // Long vectors, and what is hardly a matrix.
  EXPECT_EQ(shapes_of({10'000}), (std::vector<Shape>{{9, 1024}, {1, 784}}));
  EXPECT_EQ(shapes_of({1'000'000, 2}), (std::vector<Shape>{{1953, 1024}, {1, 128}}));
  EXPECT_EQ(shapes_of({8192}), (std::vector<Shape>{{8, 1024}}));
}

const std::vector<std::vector<uint64_t>> kShapes = {{300, 7}, {5},    {40, 600},  {},
                                                    {5000},   {1, 3}, {17, 4099}, {1000, 3}};

/// Every row of a part names the elements that it covers, in order; the positions of its columns
/// are one to one with columns of the matrix.
TEST(MatrixForms, PartsCoverWhatIsCutOut) {
  const auto matrices = matrices_of(kShapes);
  const uint64_t total = matrices.back().end();
  std::mt19937_64 random(3);
  for (int round = 0; round < 2000; ++round) {
    const uint64_t first = random() % total;
    const uint64_t count = 1 + random() % (round % 2 == 0 ? 50 : total - first);
    const uint64_t end = std::min(first + count, total);
    uint64_t element = first;
    uint64_t factors = 0;
    for (const MatrixLayout& matrix : matrices_in(matrices, first, end - first)) {
      const MatrixPart part = part_of(matrix, first, end - first);
      EXPECT_EQ(part.first, element);
      std::map<uint64_t, uint64_t> column_of;  // by position
      part.each_row([&](uint64_t row, uint64_t position, uint64_t n) {
        ASSERT_GT(n, 0u);
        ASSERT_LT(row, part.rows());
        ASSERT_LE(position + n, part.columns());
        for (uint64_t i = 0; i < n; ++i, ++element) {
          ASSERT_EQ((element - matrix.first) / matrix.columns, part.first_row() + row);
          const uint64_t column = (element - matrix.first) % matrix.columns;
          ASSERT_EQ(column, (part.first_column() + position + i) % matrix.columns);
          ASSERT_EQ(column_of.emplace(position + i, column).first->second, column);
        }
      });
      EXPECT_EQ(column_of.size(), part.columns());
      factors += part.factors();
    }
    EXPECT_EQ(element, end);
    EXPECT_EQ(factors_in(matrices, first, end - first), factors);
  }
  EXPECT_TRUE(matrices_in(matrices, total, 0).empty());
}

/// However the space is cut, the same samples come to the same places, and all places are filled.
TEST(MatrixForms, SamplesDoNotDependOnHowTheSpaceIsCut) {
  const auto matrices = matrices_of(kShapes);
  const uint64_t total = matrices.back().end();
  std::vector<float> values(total);
  for (uint64_t i = 0; i < total; ++i) values[i] = 1.0f + static_cast<float>(i % 251);
  std::vector<base::Bf16> whole(sample_count(matrices));
  take_samples(matrices, 0, values, whole.data());
  for (const base::Bf16 sample : whole) ASSERT_GT(base::to_f32(sample), 0);
  EXPECT_EQ(samples_in(matrices, 0, total), whole.size());
  for (const uint64_t cut : {1ul, 100ul, 4096ul, 10'001ul}) {
    std::vector<base::Bf16> parts(whole.size());
    uint64_t taken = 0;
    for (uint64_t first = 0; first < total; first += cut) {
      const uint64_t count = std::min(cut, total - first);
      take_samples(matrices, first, std::span(values).subspan(first, count), parts.data());
      taken += samples_in(matrices, first, count);
    }
    EXPECT_EQ(taken, whole.size());
    for (size_t i = 0; i < whole.size(); ++i) ASSERT_EQ(parts[i].bits, whole[i].bits) << i;
  }
}

TEST(MatrixForms, SamplesAreOfTheRowsAndColumnsTheyName) {
  const auto matrices = matrices_of(kShapes);
  for (const MatrixLayout& matrix : matrices) {
    const MatrixSamples samples{matrix};
    std::set<uint64_t> rows;
    for (uint64_t s = 0; s < samples.sampled_rows(); ++s) rows.insert(samples.row(s));
    EXPECT_EQ(rows.size(), samples.sampled_rows());
    EXPECT_LT(*rows.rbegin(), matrix.rows);
    std::vector<float> values(matrix.count());
    for (uint64_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>((i / matrix.columns) % 16 * 16 + i % matrix.columns % 16);
    }
    std::vector<base::Bf16> taken(sample_count(matrices));
    take_samples(matrices, matrix.first, values, taken.data());
    for (uint64_t s = 0; s < samples.sampled_rows(); ++s) {
      for (uint64_t c = 0; c < matrix.columns; ++c) {
        ASSERT_EQ(base::to_f32(taken[samples.of_row(s) + c]),
                  values[samples.row(s) * matrix.columns + c]);
      }
    }
    for (uint64_t r = 0; r < matrix.rows; ++r) {
      for (uint64_t s = 0; s < samples.sampled_columns(); ++s) {
        ASSERT_EQ(base::to_f32(taken[samples.of_columns(r) + s]),
                  values[r * matrix.columns + samples.column(s)]);
      }
    }
  }
}

TEST(MatrixForms, SamplesAreFewOfAMatrix) {
  const auto matrices = matrices_of({{4096, 4096}});
  EXPECT_LT(static_cast<double>(sample_count(matrices)), 0.016 * 4096 * 4096);
}

}  // namespace
}  // namespace smartinf::compress
