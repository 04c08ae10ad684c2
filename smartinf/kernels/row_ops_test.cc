// Operations on rows beside the same in double.
#include "smartinf/kernels/row_ops.h"

#include <cmath>
#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/kernels/row_product.h"
#include "smartinf/kernels/test_kernels.h"

namespace smartinf::kernels {
namespace {

constexpr size_t kCount = 83;  // no multiple of any vector

double at(std::span<const float> row, size_t i) { return static_cast<double>(row[i]); }

std::vector<float> numbers(double scale, double offset = 0) {
  std::vector<float> values(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    values[i] = static_cast<float>(offset + scale * std::sin(static_cast<double>(i * i + 1)));
  }
  return values;
}

/// Some roundings of f32 in numbers that are as large as `scale`.
void expect_near(const std::vector<float>& row, const std::function<double(size_t)>& exact,
                 double scale) {
  for (size_t i = 0; i < row.size(); ++i)
    EXPECT_NEAR(at(row, i), exact(i), 8 * 0x1p-23 * scale) << i;
}

TEST(RowOps, NormsAreThoseInDouble) {
  const std::vector<float> in = numbers(3, 1);
  const std::vector<float> factor = numbers(0.5, 1);
  const std::vector<float> bias = numbers(2);
  double sum = 0;
  double squares = 0;
  for (size_t i = 0; i < kCount; ++i) {
    sum += at(in, i);
    squares += at(in, i) * at(in, i);
  }
  const double mean = sum / kCount;
  const double variance = squares / kCount - mean * mean;
  std::vector<float> out(kCount);
  rms_norm(DataType::kF32, factor, 0.25f, in, out);
  expect_near(
      out, [&](size_t i) { return at(in, i) / std::sqrt(squares / kCount + 0.25) * at(factor, i); },
      3);
  layer_norm(DataType::kF32, factor, bias, 0.25f, in, out);
  expect_near(
      out,
      [&](size_t i) {
        return (at(in, i) - mean) / std::sqrt(variance + 0.25) * at(factor, i) + at(bias, i);
      },
      5);
}

TEST(RowOps, ActivationsAreThoseInDouble) {
  for (const double scale : {0.01, 3.0, 200.0}) {
    const std::vector<float> in = numbers(scale);
    std::vector<float> row = in;
    silu(DataType::kF32, row);
    expect_near(
        row, [&](size_t i) { return at(in, i) / (1 + std::exp(-at(in, i))); }, scale);
    row = in;
    gelu(DataType::kF32, row);
    expect_near(
        row, [&](size_t i) { return at(in, i) * std::erfc(-at(in, i) * std::sqrt(0.5)) / 2; },
        scale);
    row = in;
    gelu_tanh(DataType::kF32, row);
    expect_near(
        row,
        [&](size_t i) {
          const double x = at(in, i);
          return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        },
        scale);
    row = in;
    soft_cap(DataType::kF32, 5, row);
    expect_near(
        row, [&](size_t i) { return 5 * std::tanh(at(in, i) / 5); }, 5);
  }
}

TEST(RowOps, HalvesOfHeadsAreTurned) {
  const std::vector<float> in = {1, 2, 3, 4, 5, 6, 7, 8};  // two heads
  const std::vector<float> cosine = {2, 3, 4, 5};
  const std::vector<float> sine = {10, 20, 30, 40};
  std::vector<float> row = in;
  rotate(DataType::kF32, cosine, sine, row);
  EXPECT_EQ(row, (std::vector<float>{2 - 30, 6 - 80, 12 + 30, 20 + 80,  //
                                     10 - 70, 18 - 160, 28 + 150, 40 + 240}));
}

TEST(RowOps, EachResultIsRoundedToTheType) {
  // 1 + 2^-8 is between two numbers of bf16, 1 + 2^-7 is one.
  std::vector<float> row = {1, 1};
  add(DataType::kBf16, std::vector<float>{0x1p-8f, 0x1p-7f}, row);
  EXPECT_EQ(row, (std::vector<float>{1, 1 + 0x1p-7f}));
  multiply(DataType::kBf16, std::vector<float>{1, 1 + 0x1p-7f}, row);
  EXPECT_EQ(row, (std::vector<float>{1, 1 + 0x1p-6f}));
  multiply(DataType::kBf16, 1 + 0x1p-12f, row);
  EXPECT_EQ(row, (std::vector<float>{1, 1 + 0x1p-6f}));
  row = {NAN, INFINITY};
  round_to(DataType::kBf16, row);
  EXPECT_TRUE(std::isnan(row[0]) && row[1] == INFINITY);
}

}  // namespace
}  // namespace smartinf::kernels
