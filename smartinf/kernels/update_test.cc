// The scalar truth against formulas written out here.
#include "smartinf/kernels/update.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/kernels/test_kernels.h"

namespace smartinf::kernels {
namespace {

TEST(UpdateBlock, AdamWFollowsTheFormula) {
  const RuleOptions options{.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6};
  const GroupOptions group{.lr = 0.01, .weight_decay = 0.1};
  std::vector<float> master = {1.0f, -2.0f, 0.5f};
  std::vector<float> momentum(3);
  std::vector<float> variance(3);
  std::vector<double> p(master.begin(), master.end());
  std::vector<double> m(3);
  std::vector<double> v(3);
  const std::vector<float> gradient = {0.1f, -3.0f, 0.0f};
  std::vector<float> weights(3);
  for (uint64_t step = 1; step <= 20; ++step) {
    const StepScalars scalars = make_step_scalars(options, group, step, 0.5, 0);
    const ScalarsSpan run{3, &scalars};
    scalar().update_block(StateFormat::kF32,
                          {.planes = {plane_of(master), plane_of(momentum), plane_of(variance)},
                           .count = 3,
                           .gradient = gradient.data(),
                           .gradient_type = DataType::kF32,
                           .weights_out = weights.data(),
                           .weights_type = DataType::kF32},
                          {&run, 1});
    for (size_t i = 0; i < 3; ++i) {
      const double g = gradient[i] * 0.5;
      p[i] *= 1 - 0.01 * 0.1;
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.99 * v[i] + 0.01 * g * g;
      const double m_hat = m[i] / (1 - std::pow(0.9, step));
      const double v_hat = v[i] / (1 - std::pow(0.99, step));
      p[i] -= 0.01 * m_hat / (std::sqrt(v_hat) + 1e-6);
      // 20 steps of f32 rounding, each at most a few 6e-8.
      ASSERT_NEAR(master[i], p[i], 2e-6) << "step " << step << " element " << i;
      ASSERT_EQ(weights[i], master[i]);
    }
  }
}

TEST(UpdateBlock, GivenSquaresTakeThePlaceOfTheGradients) {
  const size_t n = 20 * kTileElements + 3;
  // Rows that begin and end anywhere.
  const std::vector<float> columns = {4.0f, 0.25f, 1.0f, 2.0f, 0.5f, 8.0f, 16.0f};
  std::vector<SecondMomentRow> rows = {{3, 0.5f, columns.data() + 4}};
  for (uint64_t left = n - 3; left > 0; left -= rows.back().count) {
    rows.push_back({std::min<uint64_t>(7, left), static_cast<float>(rows.size()), columns.data()});
  }
  std::vector<float> gradient(n, 0.5f);
  gradient[5] = 30;  // too large for what the variance was
  gradient[6] = 4;   // larger than what is given, and not too large
  const StepScalars scalars =
      make_step_scalars({.beta1 = 0.9, .beta2 = 0.75, .eps = 1e-6}, {.lr = 0.01}, 1, 1, 0);
  std::vector<float> master(n, 1.0f);
  std::vector<float> momentum(n);
  std::vector<float> variance(n, 8.0f);
  const ScalarsSpan run{n, &scalars};
  scalar().update_block(StateFormat::kF32,
                        {.planes = {plane_of(master), plane_of(momentum), plane_of(variance)},
                         .count = n,
                         .gradient = gradient.data(),
                         .gradient_type = DataType::kF32,
                         .second_moment = rows},
                        {&run, 1});
  for (size_t i = 0; i < n; ++i) {
    const double square =
        i < 3 ? 0.5 * columns[4 + i] : static_cast<double>((i - 3) / 7 + 1) * columns[(i - 3) % 7];
    const double own = gradient[i];
    const double v = std::max(0.75 * 8 + 0.25 * square, 0.25 * own * own);
    ASSERT_FLOAT_EQ(variance[i], static_cast<float>(v)) << i;
    ASSERT_FLOAT_EQ(momentum[i], 0.1f * gradient[i]);
    // The first step's corrections make the momentum's share 1 and the variance's 1 / 0.25.
    ASSERT_NEAR(master[i], 1 - 0.01 * own / std::sqrt(v / 0.25), 1e-7) << i;
  }
}

TEST(UpdateBlock, RunsGiveEachElementItsGroup) {
  const StepScalars fast =
      make_step_scalars({.rule = UpdateRule::kSgdMomentum, .beta1 = 0}, {.lr = 1}, 1, 1, 0);
  const StepScalars slow =
      make_step_scalars({.rule = UpdateRule::kSgdMomentum, .beta1 = 0}, {.lr = 0.25}, 1, 1, 0);
  const size_t n = 1000;
  std::vector<float> master(n, 0.0f);
  std::vector<float> momentum(n);
  const std::vector<float> gradient(n, 1.0f);
  const std::array runs = {ScalarsSpan{1, &fast}, ScalarsSpan{0, &slow}, ScalarsSpan{300, &slow},
                           ScalarsSpan{699, &fast}};
  scalar().update_block(StateFormat::kF32,
                        {.planes = {plane_of(master), plane_of(momentum)},
                         .count = n,
                         .gradient = gradient.data(),
                         .gradient_type = DataType::kF32},
                        runs);
  for (size_t i = 0; i < n; ++i) {
    ASSERT_EQ(master[i], i >= 1 && i < 301 ? -0.25f : -1.0f) << i;
  }
}

// A parameter without a gradient keeps every bit of its state, also where it shares a q8 tile's
// neighbourhood with one that has; its weights come out all the same.
TEST(UpdateBlock, SkippedRunsKeepTheirBits) {
  const RuleOptions options;
  const StepScalars on = make_step_scalars(options, {.lr = 1}, 3, 1, 0);
  const StepScalars off = make_step_scalars(options, {.lr = 1, .skip = true}, 3, 1, 0);
  const size_t n = 1024;
  for (const StateFormat format :
       {StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8, StateFormat{MomentFormat::kQ4}}) {
    std::vector<float> master(n, 3.0f);
    std::vector<std::byte> momentum(base::encoded_bytes(Encoding::kF32, n), std::byte{0x11});
    std::vector<std::byte> variance = momentum;
    const std::vector<float> gradient(n, 1.0f);
    std::vector<float> weights(n);
    const std::array runs = {ScalarsSpan{256, &on}, ScalarsSpan{512, &off}, ScalarsSpan{256, &on}};
    scalar().update_block(format,
                          {.planes = {plane_of(master), momentum.data(), variance.data()},
                           .count = n,
                           .gradient = gradient.data(),
                           .gradient_type = DataType::kF32,
                           .weights_out = weights.data(),
                           .weights_type = DataType::kF32},
                          runs);
    const uint64_t tile_bytes =
        base::encoded_bytes(plane_encoding(format, PlaneKind::kMomentum), 1024) / 1024 * 256;
    const uint64_t coded = format.moments == MomentFormat::kQ4 ? 128 : tile_bytes;
    for (size_t i = 0; i < n; ++i) {
      const bool skipped = i >= 256 && i < 768;
      ASSERT_EQ(weights[i], master[i]);
      ASSERT_EQ(master[i] == 3.0f, skipped) << i;
    }
    for (size_t byte = coded; byte < 3 * coded; ++byte) {
      ASSERT_EQ(momentum[byte], std::byte{0x11}) << byte;
      ASSERT_EQ(variance[byte], std::byte{0x11}) << byte;
    }
  }
}

/// A state of any format after some steps, in blocks that begin at multiples of `cut`.
struct Trained {
  std::vector<std::vector<float>> planes;
  std::vector<float> weights;
};
Trained train(const KernelTable& table, StateFormat format, size_t n, size_t cut) {
  const std::span<const PlaneKind> kinds = rule_planes(UpdateRule::kAdamW);
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> gradient(n);
  for (float& value : gradient) value = normal(random);
  Trained trained{{kinds.size(), std::vector<float>(n)}, std::vector<float>(n)};
  for (float& value : trained.planes[0]) value = normal(random);
  for (size_t first = 0; first < n; first += cut) {
    const size_t count = std::min(cut, n - first);
    std::vector<std::vector<std::byte>> planes;
    UpdateBlock block{.count = count,
                      .element = 512 + first,
                      .gradient = gradient.data() + first,
                      .gradient_type = DataType::kF32,
                      .weights_out = trained.weights.data() + first,
                      .weights_type = DataType::kF32};
    for (size_t i = 0; i < kinds.size(); ++i) {
      const Encoding encoding = base::plane_encoding(format, kinds[i]);
      planes.emplace_back(base::encoded_bytes(encoding, count));
      table.encode_block(encoding, kinds[i], trained.planes[i].data() + first, planes[i].data(),
                         count, block.element, 0, 9);
      block.planes[i] = planes[i].data();
    }
    for (uint64_t step = 1; step <= 3; ++step) {
      const StepScalars on = make_step_scalars({}, {.lr = 1e-3}, step, 1, 9);
      const StepScalars off = make_step_scalars({}, {.lr = 1e-3, .skip = true}, step, 1, 9);
      // Elements from 300 on change in the first step only.
      const uint64_t changing = first < 300 ? std::min<uint64_t>(count, 300 - first) : 0;
      const std::array runs = {ScalarsSpan{changing, &on},
                               ScalarsSpan{count - changing, step == 1 ? &on : &off}};
      table.update_block(format, block, runs);
    }
    for (size_t i = 0; i < kinds.size(); ++i) {
      table.decode_block(base::plane_encoding(format, kinds[i]), kinds[i], planes[i].data(),
                         trained.planes[i].data() + first, count);
    }
  }
  return trained;
}

// New weights are the master weights as stored, rounded, also of elements that a step leaves alone:
// who goes on from the state has the weights of who did not stop. And rounding knows an element by
// its place in the parameter space, not by its block.
TEST(UpdateBlock, WeightsAreTheStoredMastersWhereverBlocksBegin) {
  const size_t n = 20 * kTileElements + 77;
  for (const MasterFormat master : {MasterFormat::kF32, MasterFormat::kM24, MasterFormat::kBf16}) {
    for (const MomentFormat moments :
         {MomentFormat::kF32, MomentFormat::kBf16, MomentFormat::kQ8, MomentFormat::kQ4}) {
      const StateFormat format{moments, master};
      for (const KernelTable* table : supported_tables()) {
        const Trained whole = train(*table, format, n, n);
        EXPECT_EQ(whole.weights, whole.planes[0])
            << table->isa() << " " << state_format_name(format);
        const Trained cut = train(*table, format, n, 3 * kTileElements);
        EXPECT_EQ(cut.weights, whole.weights) << table->isa() << " " << state_format_name(format);
        EXPECT_EQ(cut.planes, whole.planes) << table->isa() << " " << state_format_name(format);
      }
    }
  }
}

TEST(M24, KeepsTheUpper24BitsAndWhatIsNoNumber) {
  const auto stored = [](float value, uint32_t random) { return round_m24(value, random); };
  const uint32_t most = 0xffffffffu;
  for (const uint32_t bits :
       {0u, 0x80000000u, 0x3f800000u, 0x00000100u, 0x7f800000u, 0xff800000u}) {
    EXPECT_EQ(stored(std::bit_cast<float>(bits), most), bits) << std::hex << bits;
  }
  EXPECT_EQ(stored(std::bit_cast<float>(0x3f800001u), most), 0x3f800100u);
  EXPECT_EQ(stored(std::bit_cast<float>(0x3f800001u), 0), 0x3f800000u);
  EXPECT_EQ(stored(std::bit_cast<float>(0x00000001u), most), 0x00000100u);  // denormal
  EXPECT_EQ(stored(std::bit_cast<float>(0x7f7fff01u), most), 0x7f800000u);  // as bf16 does
  EXPECT_EQ(stored(std::bit_cast<float>(0xffc12345u), most), kCanonicalNan);
  EXPECT_EQ(std::bit_cast<uint32_t>(decode_m24(0xbf81, 0x23)), 0xbf812300u);
}

TEST(PartialNorm, AddsSquaresAndFindsTheFirstBad) {
  std::vector<float> values(10000, 2.0f);
  KernelTable::Norm norm = scalar().partial_norm(values.data(), DataType::kF32, values.size());
  EXPECT_EQ(norm.sum_of_squares, 40000.0);
  EXPECT_TRUE(norm.finite);
  values[9000] = std::numeric_limits<float>::quiet_NaN();
  values[8999] = -std::numeric_limits<float>::infinity();
  norm = scalar().partial_norm(values.data(), DataType::kF32, values.size());
  EXPECT_FALSE(norm.finite);
  EXPECT_EQ(norm.first_bad, 8999u);
  EXPECT_EQ(scalar().partial_norm(nullptr, DataType::kF32, 0).sum_of_squares, 0.0);
  // The largest f32 squared 8999 times is still finite in f64.
  std::fill(values.begin(), values.end(), std::numeric_limits<float>::max());
  EXPECT_TRUE(scalar().partial_norm(values.data(), DataType::kF32, values.size()).finite);
}

}  // namespace
}  // namespace smartinf::kernels
