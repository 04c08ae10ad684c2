// Products of a matrix with few rows, with every instruction set: near those in double, and with
// the same bits for a row alone and among others.
#include "smartinf/kernels/row_product.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/kernels/test_kernels.h"

namespace smartinf::kernels {
namespace {

struct Size {
  size_t outputs, inputs;
};
// Beside whole blocks of every instruction set, and among several threads' parts.
constexpr Size kSizes[] = {{1, 1}, {3, 31}, {4, 32}, {5, 65}, {131, 96}, {193, 100}};
constexpr size_t kRows = 19;  // more than at once

class Matrix {
 public:
  Matrix(Size size, DataType type, bool transposed, bool bias) : size_(size), type_(type) {
    matrix_ = {.type = type, .outputs = size.outputs, .inputs = size.inputs};
    matrix_.transposed = transposed;
    std::vector<float> values = draw(size.outputs * (size.inputs + 1), 1);
    round_to(type, values);
    stored_.resize(values.size() * base::data_type_bytes(type));
    scalar().cast_from_f32(values.data(), stored_.data(), type, values.size());
    matrix_.weights = stored_.data();
    bias_.assign(values.end() - static_cast<std::ptrdiff_t>(size.outputs), values.end());
    if (!bias) std::ranges::fill(bias_, 0.0f);
    const uint64_t behind = size.outputs * size.inputs * base::data_type_bytes(type);
    if (bias) matrix_.bias = stored_.data() + behind;
    values_ = std::move(values);
  }

  static std::vector<float> draw(size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> usual(0, 1);
    std::vector<float> values(count);
    for (float& value : values) value = usual(random);
    return values;
  }

  const RowMatrix& get() const { return matrix_; }
  /// The product in double, and the sum of magnitudes that its error is a share of.
  std::pair<double, double> exact(const float* x, size_t output) const {
    double sum = static_cast<double>(bias_[output]);
    double magnitudes = std::fabs(sum);
    for (size_t k = 0; k < size_.inputs; ++k) {
      const size_t at = matrix_.transposed ? k * size_.outputs + output : output * size_.inputs + k;
      const double product = static_cast<double>(values_[at]) * static_cast<double>(x[k]);
      sum += product;
      magnitudes += std::fabs(product);
    }
    return {sum, magnitudes};
  }

 private:
  Size size_;
  DataType type_;
  RowMatrix matrix_;
  std::vector<float> values_, bias_;
  std::vector<std::byte> stored_;
};

template <class Check>
void for_each_matrix(const Check& check) {
  for (const DataType type : {DataType::kBf16, DataType::kF32}) {
    for (const bool transposed : {false, true}) {
      for (const Size size : kSizes) {
        SCOPED_TRACE(std::string(base::data_type_name(type)) + (transposed ? " transposed " : " ") +
                     std::to_string(size.outputs) + " x " + std::to_string(size.inputs));
        check(Matrix(size, type, transposed, /*bias=*/size.outputs % 2 == 1), type, size);
      }
    }
  }
}

TEST(RowProduct, IsNearTheProductInDouble) {
  base::ThreadTeam team(1, "test");
  for (const KernelTable* table : supported_tables()) {
    SCOPED_TRACE(table->isa());
    RowProduct product(team, *table);
    for_each_matrix([&](const Matrix& matrix, DataType type, Size size) {
      std::vector<float> x = Matrix::draw(kRows * size.inputs, 2);
      std::vector<float> y(kRows * size.outputs);
      product.run(matrix.get(), x, y);
      for (size_t i = 0; i < y.size(); ++i) {
        const auto [sum, magnitudes] =
            matrix.exact(x.data() + i / size.outputs * size.inputs, i % size.outputs);
        // Each of so many sums is rounded once, and the result to its type.
        const double rounding = static_cast<double>(size.inputs + 1) * 0x1p-24 * magnitudes +
                                (type == DataType::kBf16 ? 0x1p-8 * std::fabs(sum) : 0);
        ASSERT_NEAR(static_cast<double>(y[i]), sum, rounding) << i;
      }
    });
  }
}

TEST(RowProduct, ARowHasTheSameBitsAloneAndAmongOthers) {
  base::ThreadTeam one(1, "test");
  base::ThreadTeam three(3, "test");
  for (const KernelTable* table : supported_tables()) {
    SCOPED_TRACE(table->isa());
    RowProduct alone(one, *table);
    RowProduct together(three, *table);
    for_each_matrix([&](const Matrix& matrix, DataType /*type*/, Size size) {
      const std::vector<float> x = Matrix::draw(kRows * size.inputs, 3);
      const std::span<const float> all(x);
      std::vector<float> of_one(size.outputs);
      std::vector<std::vector<float>> rows;
      for (size_t r = 0; r < kRows; ++r) {
        alone.run(matrix.get(), all.subspan(r * size.inputs, size.inputs), of_one);
        rows.push_back(of_one);
      }
      for (const size_t count : {2u, 3u, 5u, 16u, 19u}) {
        const size_t first = kRows - count;
        std::vector<float> y(count * size.outputs);
        together.run(matrix.get(), all.subspan(first * size.inputs), y);
        for (size_t r = 0; r < count; ++r) {
          ASSERT_EQ(std::memcmp(y.data() + r * size.outputs, rows[first + r].data(),
                                size.outputs * sizeof(float)),
                    0)
              << "row " << r << " of " << count;
        }
      }
    });
  }
}

// A number that is not finite reaches its own row and output only, also beside padding.
TEST(RowProduct, InfinitiesStayWhereTheyAre) {
  base::ThreadTeam team(1, "test");
  const std::vector<float> weights(size_t{5} * 33, INFINITY);
  for (const KernelTable* table : supported_tables()) {
    for (const bool transposed : {false, true}) {
      SCOPED_TRACE(table->isa());
      std::vector<float> x(size_t{2} * 33, 1.0f);
      x[0] = NAN;
      std::vector<float> y(size_t{2} * 5);
      RowProduct(team, *table)
          .run({.weights = weights.data(),
                .type = DataType::kF32,
                .outputs = 5,
                .inputs = 33,
                .transposed = transposed},
               x, y);
      for (size_t n = 0; n < 5; ++n) {
        EXPECT_TRUE(std::isnan(y[n]));
        EXPECT_EQ(y[5 + n], INFINITY);
      }
    }
  }
}

}  // namespace
}  // namespace smartinf::kernels
