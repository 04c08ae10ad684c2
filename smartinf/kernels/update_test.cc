// The scalar truth against formulas written out here, and the codecs against their promises.
#include "smartinf/kernels/update.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace smartinf::kernels {
namespace {

using base::DataType;
using base::Encoding;
using base::PlaneKind;
using base::StateFormat;

const KernelTable& scalar() { return *supported_tables().front(); }

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
    const GroupRun run{3, &scalars};
    scalar().update_block(StateFormat::kF32,
                          {.planes = {reinterpret_cast<std::byte*>(master.data()),
                                      reinterpret_cast<std::byte*>(momentum.data()),
                                      reinterpret_cast<std::byte*>(variance.data())},
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

TEST(UpdateBlock, RunsGiveEachElementItsGroup) {
  const StepScalars fast =
      make_step_scalars({.rule = UpdateRule::kSgdMomentum, .beta1 = 0}, {.lr = 1}, 1, 1, 0);
  const StepScalars slow =
      make_step_scalars({.rule = UpdateRule::kSgdMomentum, .beta1 = 0}, {.lr = 0.25}, 1, 1, 0);
  const size_t n = 1000;
  std::vector<float> master(n, 0.0f);
  std::vector<float> momentum(n);
  const std::vector<float> gradient(n, 1.0f);
  const std::array runs = {GroupRun{1, &fast}, GroupRun{0, &slow}, GroupRun{300, &slow},
                           GroupRun{699, &fast}};
  scalar().update_block(StateFormat::kF32,
                        {.planes = {reinterpret_cast<std::byte*>(master.data()),
                                    reinterpret_cast<std::byte*>(momentum.data())},
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
  for (const StateFormat format : {StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8}) {
    std::vector<float> master(n, 3.0f);
    std::vector<std::byte> momentum(base::encoded_bytes(Encoding::kF32, n), std::byte{0x11});
    std::vector<std::byte> variance = momentum;
    const std::vector<float> gradient(n, 1.0f);
    std::vector<float> weights(n);
    const std::array runs = {GroupRun{256, &on}, GroupRun{512, &off}, GroupRun{256, &on}};
    scalar().update_block(
        format,
        {.planes = {reinterpret_cast<std::byte*>(master.data()), momentum.data(), variance.data()},
         .count = n,
         .gradient = gradient.data(),
         .gradient_type = DataType::kF32,
         .weights_out = weights.data(),
         .weights_type = DataType::kF32},
        runs);
    const uint64_t width = base::encoded_bytes(plane_encoding(format, PlaneKind::kMomentum), 4) / 4;
    const uint64_t element_bytes = format == StateFormat::kQ8 ? 1 : width;
    for (size_t i = 0; i < n; ++i) {
      const bool skipped = i >= 256 && i < 768;
      ASSERT_EQ(weights[i], master[i]);
      ASSERT_EQ(master[i] == 3.0f, skipped) << i;
      if (!skipped) continue;
      for (size_t byte = i * element_bytes; byte < (i + 1) * element_bytes; ++byte) {
        ASSERT_EQ(momentum[byte], std::byte{0x11}) << i;
        ASSERT_EQ(variance[byte], std::byte{0x11}) << i;
      }
    }
  }
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

class Codec : public testing::TestWithParam<PlaneKind> {};

// Rounded a thousand times with different steps, a value must be right on average.
TEST_P(Codec, StochasticRoundingIsUnbiased) {
  const PlaneKind kind = GetParam();
  std::mt19937 random(1);
  std::lognormal_distribution<float> spread(0, 2);
  std::vector<float> values(256);
  for (float& value : values) {
    value = spread(random);
    if (kind == PlaneKind::kMomentum && (random() & 1) != 0) value = -value;
  }
  for (const Encoding encoding : {Encoding::kBf16, Encoding::kQ8}) {
    std::vector<std::byte> block(base::encoded_bytes(encoding, values.size()));
    std::vector<float> decoded(values.size());
    std::vector<double> sum(values.size());
    std::vector<double> squares(values.size());
    const int rounds = 4000;
    for (int step = 1; step <= rounds; ++step) {
      scalar().encode_block(encoding, kind, values.data(), block.data(), values.size(), 512,
                            static_cast<uint64_t>(step), 99);
      scalar().decode_block(encoding, kind, block.data(), decoded.data(), values.size());
      for (size_t i = 0; i < values.size(); ++i) {
        sum[i] += decoded[i];
        squares[i] += (decoded[i] - values[i]) * (decoded[i] - values[i]);
      }
    }
    for (size_t i = 0; i < values.size(); ++i) {
      const double mean = sum[i] / rounds;
      const double deviation = std::sqrt(squares[i] / rounds / rounds);
      // Five standard errors, plus the rounding of scale and code to f32.
      ASSERT_NEAR(mean, values[i], 5 * deviation + 1e-6 * std::fabs(values[i]))
          << base::encoding_name(encoding) << " element " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Planes, Codec, testing::Values(PlaneKind::kMomentum, PlaneKind::kVariance),
                         [](const auto& plane) {
                           return std::string(base::plane_kind_name(plane.param));
                         });

TEST(Q8, KeepsZeroAndNeverLosesAVariance) {
  std::vector<float> values(300, 0.0f);
  values[3] = 1.0f;
  values[7] = 1e-20f;
  std::vector<std::byte> block(base::encoded_bytes(Encoding::kQ8, values.size()));
  std::vector<float> decoded(values.size());
  for (const PlaneKind kind : {PlaneKind::kMomentum, PlaneKind::kVariance}) {
    scalar().encode_block(Encoding::kQ8, kind, values.data(), block.data(), values.size(), 0, 1, 1);
    scalar().decode_block(Encoding::kQ8, kind, block.data(), decoded.data(), values.size());
    EXPECT_NEAR(decoded[3], 1.0f, 1e-6f);
    EXPECT_EQ(decoded[0], 0.0f);
    EXPECT_EQ(decoded[299], 0.0f);
    if (kind == PlaneKind::kVariance) {
      EXPECT_GT(decoded[7], 0.0f);
    }
  }
}

TEST(Q8, ABrokenGroupStaysBrokenAndAlone) {
  std::vector<float> values(512, 1.0f);
  values[300] = std::numeric_limits<float>::infinity();
  std::vector<std::byte> block(base::encoded_bytes(Encoding::kQ8, values.size()));
  std::vector<float> decoded(values.size());
  scalar().encode_block(Encoding::kQ8, PlaneKind::kMomentum, values.data(), block.data(),
                        values.size(), 0, 1, 1);
  scalar().decode_block(Encoding::kQ8, PlaneKind::kMomentum, block.data(), decoded.data(),
                        values.size());
  EXPECT_NEAR(decoded[255], 1.0f, 1e-6f);
  for (size_t i = 256; i < 512; ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(decoded[i]), kCanonicalNan) << i;
  }
}

}  // namespace
}  // namespace smartinf::kernels
