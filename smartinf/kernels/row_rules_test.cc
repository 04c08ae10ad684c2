#include "smartinf/kernels/row_rules.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/arithmetic.h"
#include "smartinf/base/checksum.h"
#include "smartinf/kernels/update.h"

namespace smartinf::kernels {
namespace {

using base::DataType;

constexpr std::array kRules = {RowRule::kSgd, RowRule::kSparseAdam, RowRule::kRowAdagrad,
                               RowRule::kRowAdam, RowRule::kAdamW};

struct Record {
  Record(RowRule rule, uint64_t dim) : numbers(record_bytes(rule, dim) / sizeof(float)) {}
  std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(numbers)); }
  std::vector<float> numbers;
};

/// From -1 to 1, the same on every machine.
float value_at(uint64_t seed, uint64_t i) {
  return static_cast<float>(static_cast<int64_t>(base::mix_seed(seed, i))) * 0x1p-63f;
}

std::vector<float> values_of(uint64_t seed, size_t n) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = value_at(seed, i);
  return values;
}

TEST(RowRules, NamesComeBackAndRecordsHaveTheirPlanes) {
  for (const RowRule rule : kRules) EXPECT_EQ(row_rule_from_name(row_rule_name(rule)), rule);
  EXPECT_FALSE(row_rule_from_name("adam"));
  EXPECT_EQ(record_bytes(RowRule::kSgd, 64), 64 * 4 + 4u);
  EXPECT_EQ(record_bytes(RowRule::kSparseAdam, 64), 3 * 64 * 4 + 4u);
  EXPECT_EQ(record_bytes(RowRule::kAdamW, 64), 3 * 64 * 4 + 4u);
  EXPECT_EQ(record_bytes(RowRule::kRowAdagrad, 64), 64 * 4 + 8u);
  EXPECT_EQ(record_bytes(RowRule::kRowAdam, 64), 2 * 64 * 4 + 8u);
}

TEST(RowRules, OneAccumulatorOfARowTakesTheMeanSquare) {
  const std::vector<float> gradient = {1, -7, 5, -5};  // mean square 25
  const RowOptions options{.rule = RowRule::kRowAdagrad, .eps = 1e-6};
  Record adagrad(options.rule, 4);
  update_record(make_row_scalars(options, 0.5, 1, 2), gradient, adagrad.bytes());
  EXPECT_EQ(adagrad.numbers[4], 100.0f);  // scaled by 2
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_FLOAT_EQ(adagrad.numbers[i], -0.5f * 2 * gradient[i] / 10);
  }
  Record adam(RowRule::kRowAdam, 4);
  update_record(make_row_scalars({.rule = RowRule::kRowAdam, .eps = 1e-6}, 0.5, 1, 2), gradient,
                adam.bytes());
  EXPECT_FLOAT_EQ(adam.numbers[8], 0.1f);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_FLOAT_EQ(adam.numbers[4 + i], 0.2f * gradient[i]);
    // Both bias corrections are undone in the first step.
    EXPECT_FLOAT_EQ(adam.numbers[i], -0.5f * 2 * gradient[i] / 10);
  }
  EXPECT_EQ(record_step(adam.bytes()), 1u);
}

// SparseAdam's bits are compared with torch's in tests/python/kernels_parity_test.py; AdamW's are
// the dense rule's. Here: that they are the same on every machine. A change of formula changes
// them.
TEST(RowRules, TheSameNumbersOnEveryMachine) {
  uint64_t digest = 0;
  for (const RowRule rule : kRules) {
    for (const uint64_t dim : {1, 16, 37, 64}) {
      Record record(rule, dim);
      initial_record({.deviation = 0.02, .seed = 5}, 2, 123456789012, dim, record.bytes());
      for (uint64_t step = 3; step < 20; ++step) {
        const RowOptions options{.rule = rule, .beta1 = 0.8, .beta2 = 0.99, .eps = 1e-6};
        update_record(make_row_scalars(options, 1e-3, step, 0.25), values_of(step, dim),
                      record.bytes());
      }
      EXPECT_EQ(record_step(record.bytes()), 19u);
      digest = base::checksum(record.bytes(), digest);
    }
  }
  EXPECT_EQ(digest, 9412019158965859067u);
}

TEST(RowRules, NanIsTheOneNan) {
  for (const RowRule rule : kRules) {
    Record record(rule, 20);
    std::vector<float> gradient(20, 1.0f);
    gradient[18] = std::bit_cast<float>(0xffc12345u);
    update_record(make_row_scalars({.rule = rule}, 1e-3, 1, 1), gradient, record.bytes());
    EXPECT_EQ(std::bit_cast<uint32_t>(record.numbers[18]), 0x7fc00000u) << row_rule_name(rule);
    const bool of_row = rule == RowRule::kRowAdagrad || rule == RowRule::kRowAdam;
    EXPECT_EQ(std::isnan(record.numbers[0]), of_row) << row_rule_name(rule);
  }
}

/// Records of AdamW as training leaves them, with numbers of every kind.
Record trained_record(uint64_t seed, uint64_t dim, std::span<const RowScalars> steps) {
  Record record(RowRule::kAdamW, dim);
  initial_record({.deviation = 1, .seed = seed}, 0, seed, dim, record.bytes());
  for (const RowScalars& scalars : steps) {
    std::vector<float> gradient = values_of(seed + scalars.step.step, dim);
    for (size_t i = 0; i < dim; ++i) {
      gradient[i] *= std::pow(10.0f, static_cast<float>(i % 12) - 10);
      if (i % 13 == 4) gradient[i] = i % 2 == 0 ? 0.0f : -0.0f;
    }
    update_record(scalars, gradient, record.bytes());
  }
  for (size_t i = 0; i < dim; ++i) {
    if (i % 17 == 3) record.numbers[i] = -0.0f;
    if (i % 17 == 5 || i % 17 == 12) record.numbers[dim + i] = i % 2 == 0 ? -0.0f : -1e-44f;
    if (i % 17 == 12) record.numbers[i] = record.numbers[2 * dim + i] = 0;
    if (i % 17 == 7) record.numbers[i] = 1e-41f;
    if (i % 17 == 9) record.numbers[2 * dim + i] = 0;
  }
  return record;
}

void expect_dense_bits(const RowOptions& options, uint64_t dim, size_t missed_max,
                       const std::function<double(size_t)>& rate,
                       const std::function<double(size_t)>& beta1) {
  constexpr size_t kTrained = 3;
  std::vector<RowScalars> scalars;
  for (size_t step = 1; step <= kTrained + missed_max; ++step) {
    RowOptions of_step = options;
    of_step.beta1 = beta1(step);
    scalars.push_back(make_row_scalars(of_step, rate(step), step, 1));
  }
  Record dense = trained_record(dim, dim, std::span(scalars).first(kTrained));
  const Record start = dense;
  Record in_parts = start;
  for (size_t missed = 0; missed <= missed_max; ++missed) {
    if (missed > 0) {
      // The dense path itself, as a subgroup's block of one row.
      const RowScalars& s = scalars[kTrained + missed - 1];
      const std::vector<float> zeros(dim);
      const ScalarsSpan run{dim, &s.step};
      UpdateBlock block{.count = dim, .gradient = zeros.data(), .gradient_type = DataType::kF32};
      for (size_t p = 0; p < 3; ++p) {
        block.planes[p] = reinterpret_cast<std::byte*>(dense.numbers.data() + p * dim);
      }
      kernels().update_block(base::StateFormat::kF32, block, {&run, 1});
      dense.numbers.back() = std::bit_cast<float>(static_cast<uint32_t>(kTrained + missed));
    }
    if (missed % 379 > 2 && missed % 100 != 0) continue;
    const auto expect_same = [&](Record& record, const char* what) {
      ASSERT_EQ(std::memcmp(record.numbers.data(), dense.numbers.data(), dense.bytes().size()), 0)
          << what << " dim " << dim << " missed " << missed;
    };
    Record once = start;
    catch_up(std::span(scalars).subspan(kTrained, missed), once.bytes());
    expect_same(once, "at once");
    const auto done = static_cast<size_t>(record_step(in_parts.bytes()));
    catch_up(std::span(scalars).subspan(done, kTrained + missed - done), in_parts.bytes());
    expect_same(in_parts, "in parts");
  }
}

TEST(RowRules, CatchUpHasTheBitsOfDenseAdamW) {
  const auto steady = [](double value) { return [value](size_t) { return value; }; };
  const RowOptions options{.rule = RowRule::kAdamW};
  for (const uint64_t dim : {16, 37, 64}) {
    expect_dense_bits(options, dim, 2500, steady(1e-3), steady(0.9));
  }
  // Rates that move even the last denormals; a rate and a beta that change after all came to rest.
  expect_dense_bits(options, 64, 1500, steady(30), steady(0.9));
  expect_dense_bits(
      options, 64, 1500, [](size_t step) { return step < 1300 ? 1e-3 : 50; }, steady(0.9));
  expect_dense_bits(options, 64, 1500, steady(1e-3),
                    [](size_t step) { return step < 1300 ? 0.9 : 0.3; });
  expect_dense_bits(options, 33, 300, steady(1e-2), steady(0));
}

TEST(RowRules, CatchUpOfARowThatWasNeverUpdatedSetsItsStep) {
  Record record(RowRule::kAdamW, 16);
  initial_record({.deviation = 1}, 0, 7, 16, record.bytes());
  Record expected = record;
  const std::vector<RowScalars> missed = {make_row_scalars({.rule = RowRule::kAdamW}, 1e-3, 1, 1),
                                          make_row_scalars({.rule = RowRule::kAdamW}, 1e-3, 2, 1)};
  catch_up(missed, record.bytes());
  EXPECT_EQ(record_step(record.bytes()), 2u);
  expected.numbers.back() = record.numbers.back();
  EXPECT_EQ(record.numbers, expected.numbers);
}

TEST(RowRules, FirstWeightsAreNormalAndFollowFromTheirPlaceAlone) {
  constexpr uint64_t kDim = 64;
  constexpr uint64_t kSampleRows = 4000;
  double sum = 0, squares = 0, fourths = 0, neighbours = 0, rows_apart = 0;
  size_t beyond_three = 0;
  Record before(RowRule::kSgd, kDim);
  for (uint64_t row = 0; row < kSampleRows; ++row) {
    Record record(RowRule::kSgd, kDim);
    initial_record({.deviation = 0.5, .seed = 9}, 1, row, kDim, record.bytes());
    for (size_t i = 0; i < kDim; ++i) {
      const double z = record.numbers[i] / 0.5;
      sum += z;
      squares += z * z;
      fourths += z * z * z * z;
      beyond_three += std::abs(z) > 3 ? 1 : 0;
      if (i > 0) neighbours += z * record.numbers[i - 1] / 0.5;
      rows_apart += z * before.numbers[i] / 0.5;
    }
    before = record;
  }
  constexpr double kSamples = kSampleRows * kDim;
  // Four standard errors each: of N(0, 1) they are 1, 2, 96 and 0.0027 divided by the count.
  EXPECT_NEAR(sum / kSamples, 0, 4 / std::sqrt(kSamples));
  EXPECT_NEAR(squares / kSamples, 1, 4 * std::sqrt(2 / kSamples));
  EXPECT_NEAR(fourths / kSamples, 3, 4 * std::sqrt(96 / kSamples));
  EXPECT_NEAR(static_cast<double>(beyond_three) / kSamples, 0.0026998,
              4 * std::sqrt(0.0027 / kSamples));
  EXPECT_NEAR(neighbours / kSamples, 0, 4 / std::sqrt(kSamples));
  EXPECT_NEAR(rows_apart / kSamples, 0, 4 / std::sqrt(kSamples));

  const auto weights = [](const RowStart& start, uint32_t table, uint64_t row, uint64_t dim) {
    Record record(RowRule::kSparseAdam, dim);
    record.numbers.back() = 1;
    initial_record(start, table, row, dim, record.bytes());
    EXPECT_EQ(record_step(record.bytes()), 0u);
    EXPECT_EQ(record.numbers[dim], 0.0f);
    record.numbers.resize(std::min<uint64_t>(dim, 5));
    return record.numbers;
  };
  const RowStart start{.deviation = 1, .seed = 3};
  const std::vector<float> first = weights(start, 1, 8, 64);
  EXPECT_EQ(weights(start, 1, 8, 5), first);
  EXPECT_NE(weights(start, 1, 9, 64), first);
  EXPECT_NE(weights(start, 2, 8, 64), first);
  EXPECT_NE(weights({.deviation = 1, .seed = 4}, 1, 8, 64), first);
  EXPECT_EQ(weights({}, 1, 8, 64), std::vector<float>(5, 0.0f));
}

TEST(RowRules, DuplicatesAreAddedInTheOrderOfTheBatch) {
  const std::vector<float> gradient = {1e8f, -0.0f, 3, 4, 1, -0.0f, -1e8f, 0};
  const std::vector<uint32_t> place = {1, 0, 1, 1};
  std::vector<float> sums(4, kNoGradient);
  add_rows(DataType::kF32, gradient.data(), place, 2, sums);
  EXPECT_EQ(sums[0], 3);
  EXPECT_EQ(sums[1], 4);
  EXPECT_EQ(sums[2], 0);  // 1e8 + 1 is 1e8; in another order 1 is left
  EXPECT_FALSE(std::signbit(sums[3]));
  const std::vector<uint32_t> one = {0};
  std::vector<float> alone(2, kNoGradient);
  add_rows(DataType::kF32, gradient.data(), one, 2, alone);
  EXPECT_TRUE(std::signbit(alone[1]));  // a single one is as it came

  const std::vector<base::Bf16> narrow = {base::to_bf16(1), base::to_bf16(256), base::to_bf16(1),
                                          base::to_bf16(0.5f)};
  const std::vector<uint32_t> both = {0, 0};
  std::vector<float> wide(2, kNoGradient);
  add_rows(DataType::kBf16, narrow.data(), both, 2, wide);
  EXPECT_EQ(wide, (std::vector<float>{2, 256.5f}));
}

TEST(RowRules, WeightsAreCastAsAnUpdateCastsThem) {
  Record record(RowRule::kSparseAdam, 19);
  initial_record({.deviation = 1, .seed = 1}, 0, 0, 19, record.bytes());
  std::vector<base::Bf16> out(19);
  read_weights(record.bytes(), 19, DataType::kBf16, out.data());
  for (size_t i = 0; i < 19; ++i) EXPECT_EQ(out[i].bits, base::to_bf16(record.numbers[i]).bits);
}

}  // namespace
}  // namespace smartinf::kernels
