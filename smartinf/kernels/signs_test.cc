#include "smartinf/kernels/signs.h"

#include <algorithm>
#include <bit>
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

/// Values of a normal distribution, on multiples of 1 / steps where many shall be equal.
std::vector<base::Bf16> gradients_of(size_t n, uint32_t seed, float steps = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<float> usual(0, 1);
  std::vector<base::Bf16> values(n);
  for (size_t i = 0; i < n; ++i) {
    float value = usual(random);
    if (steps > 0) value = std::round(value * steps) / steps;
    if (i % 7 == 3) value *= 1e-40f;
    if (i % 11 == 5) value = i % 2 == 0 ? 0.0f : -0.0f;
    values[i] = base::to_bf16(value);
  }
  return values;
}

struct Made {
  std::vector<base::Bf16> new_residual;
  std::vector<uint64_t> sent;
  std::vector<uint64_t> negative;
  base::Bf16 magnitude;
  float threshold = 0;
  double squares = 0;
};

/// The result of the functions that do a part each.
Made in_stages(const KernelTable& table, const FeedbackBlock& block, size_t k) {
  const size_t n = block.gradient.size();
  Made made{.new_residual = std::vector<base::Bf16>(n),
            .sent = std::vector<uint64_t>(base::divide_up(n, size_t{64})),
            .negative = std::vector<uint64_t>(base::divide_up(n, size_t{64})),
            .magnitude = {},
            .threshold = std::numeric_limits<float>::infinity()};
  std::vector<float> sum(n);
  std::vector<uint32_t> indices(k);
  std::vector<float> values(k);
  add_feedback(table, block.gradient, block.residual, block.scale, sum);
  top_k(table, sum, k, indices.data(), values.data());
  double total = 0;
  for (const float value : values) total += std::abs(value);
  made.magnitude = mean_magnitude(total, k);
  for (size_t i = 0; i < k; ++i) {
    made.threshold = std::min(made.threshold, std::abs(values[i]));
    const uint64_t bit = uint64_t{1} << indices[i] % 64;
    made.sent[indices[i] / 64] |= bit;
    if (std::signbit(values[i])) made.negative[indices[i] / 64] |= bit;
    sum[indices[i]] -= std::copysign(base::to_f32(made.magnitude), values[i]);
  }
  table.encode_block(base::Encoding::kBf16, base::PlaneKind::kMomentum, sum.data(),
                     reinterpret_cast<std::byte*>(made.new_residual.data()), n, block.element,
                     block.step, block.seed);
  made.squares = copy_squares(table, made.new_residual, nullptr);
  return made;
}

/// Nothing where it is not possible. in_place: the new residual takes the gradient's place.
std::optional<Made> at_once(const KernelTable& table, FeedbackBlock block, size_t k,
                            float threshold, bool in_place) {
  const size_t n = block.gradient.size();
  const size_t words = base::divide_up(n, size_t{64});
  const Made untouched{.new_residual = std::vector<base::Bf16>(n + 1, base::Bf16{0x4321}),
                       .sent = std::vector<uint64_t>(words + 1, 0x5555),
                       .negative = std::vector<uint64_t>(words + 1, 0x6666),
                       .magnitude = {},
                       .threshold = threshold};
  Made made = untouched;
  const auto new_residual = std::span(made.new_residual).first(n);
  const auto gradient = block.gradient;
  if (in_place) {
    std::copy(block.gradient.begin(), block.gradient.end(), new_residual.begin());
    block.gradient = new_residual;
  }
  std::vector<float> candidates(kSignCandidates);
  const auto signs =
      residual_of_signs(table, block, k, made.threshold, candidates, new_residual,
                        std::span(made.sent).first(words), std::span(made.negative).first(words));
  EXPECT_EQ(made.new_residual.back().bits, 0x4321);
  EXPECT_EQ(made.sent.back(), 0x5555u);
  EXPECT_EQ(made.negative.back(), 0x6666u);
  if (!signs) {
    EXPECT_EQ(made.threshold, threshold);
    EXPECT_EQ(made.sent, untouched.sent);
    EXPECT_EQ(made.negative, untouched.negative);
    const auto before =
        in_place ? gradient : std::span<const base::Bf16>(untouched.new_residual).first(n);
    EXPECT_EQ(std::memcmp(new_residual.data(), before.data(), n * sizeof(base::Bf16)), 0);
    return std::nullopt;
  }
  made.new_residual.pop_back();
  made.sent.pop_back();
  made.negative.pop_back();
  made.magnitude = signs->magnitude;
  made.squares = signs->residual_squares;
  return made;
}

void expect_stages(const FeedbackBlock& block, size_t k, const std::string& what) {
  const Made expected = in_stages(*supported_tables().front(), block, k);
  for (const KernelTable* table : supported_tables()) {
    // Thresholds that are right, and such that several tries are needed.
    for (const float near : {1.0f, 1.05f, 0.8f, 1.6f}) {
      const std::string where = what + " k " + std::to_string(k) + " " + std::string(table->isa()) +
                                " " + std::to_string(near);
      const auto found = at_once(*table, block, k, near * expected.threshold, near > 1);
      ASSERT_TRUE(found) << where;
      ASSERT_EQ(found->sent, expected.sent) << where;
      ASSERT_EQ(found->negative, expected.negative) << where;
      ASSERT_EQ(found->magnitude.bits, expected.magnitude.bits) << where;
      ASSERT_EQ(std::memcmp(found->new_residual.data(), expected.new_residual.data(),
                            expected.new_residual.size() * sizeof(base::Bf16)),
                0)
          << where;
      ASSERT_EQ(found->threshold, expected.threshold) << where;
      ASSERT_EQ(found->squares, expected.squares) << where;
    }
  }
}

TEST(Signs, AtOnceGivesTheBitsOfTheStages) {
  for (const size_t n : {2ul, 63ul, 64ul, 65ul, 255ul, 256ul, 257ul, 5 * 256ul + 77, 20000ul}) {
    for (const size_t shift : {0ul, 3ul}) {
      for (const float steps : {0.0f, 16.0f, 4.0f}) {  // with many and very many equal ones
        const auto gradient = gradients_of(n + shift, 1, steps);
        const auto residual = gradients_of(n + shift, 2, steps);
        const FeedbackBlock block{.gradient = std::span(gradient).subspan(shift),
                                  .residual = std::span(residual).subspan(shift),
                                  .scale = steps > 0 ? 0.5f : 0.37f,
                                  .element = 3 * kTileElements,
                                  .step = 7,
                                  .seed = 11};
        for (const size_t k : {size_t{1}, n / 100 + 1, n / 12 + 1, n / 3}) {
          if (k == 0) continue;
          const std::string what = "n " + std::to_string(n) + " of " + std::to_string(steps);
          expect_stages(block, k, what);
        }
      }
    }
  }
}

TEST(Signs, AFullBlockGivesTheBitsOfTheStages) {
  constexpr size_t kBlock = 65536;
  const auto gradient = gradients_of(2 * kBlock, 1);
  const auto residual = gradients_of(2 * kBlock, 2);
  const FeedbackBlock block{.gradient = std::span(gradient).first(kBlock),
                            .residual = std::span(residual).first(kBlock),
                            .step = 7,
                            .seed = 11,
                            .next = kBlock - 100};
  for (const size_t k : {655ul, 5243ul, 13000ul}) {
    expect_stages(block, k, "block");
  }
  for (const KernelTable* table : supported_tables()) {
    EXPECT_FALSE(at_once(*table, block, 16384, 1.0f, true));  // beyond what candidates hold
  }
}

TEST(Signs, GivesUpWhereItIsNotPossible) {
  auto gradient = gradients_of(4096, 1);
  const auto residual = gradients_of(4096, 2);
  const FeedbackBlock block{.gradient = gradient, .residual = residual, .step = 1, .seed = 2};
  for (const KernelTable* table : supported_tables()) {
    for (const bool in_place : {false, true}) {
      EXPECT_TRUE(at_once(*table, block, 300, 2.0f, in_place));
      EXPECT_FALSE(at_once(*table, block, 300, 0.0f, in_place));     // threshold not known
      EXPECT_FALSE(at_once(*table, block, 300, 1000.0f, in_place));  // far above all
      EXPECT_FALSE(at_once(*table, block, 4096, 0.1f, in_place));    // all are sent
    }
  }
  for (const float odd :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 1e6f}) {
    gradient[77] = base::to_bf16(odd);
    for (const KernelTable* table : supported_tables()) {
      EXPECT_FALSE(at_once(*table, block, 300, 2.0f, true)) << odd;
      EXPECT_FALSE(at_once(*table, block, 30, 3.0f, true)) << odd;  // few candidates
    }
  }
  // A few thousand times the threshold is no matter.
  gradient[77] = base::to_bf16(4000.0f);
  expect_stages(block, 300, "unequal");
}

TEST(Signs, GapsAreTheSameOnEveryTarget) {
  std::mt19937_64 random(3);
  for (const unsigned low_bits : {0u, 1u, 3u, 7u, 16u}) {
    for (const double share : {0.001, 0.08, 0.5}) {
      std::vector<uint64_t> sent(200);
      std::vector<uint64_t> negative(200);
      std::bernoulli_distribution taken(share);
      size_t count = 0;
      for (size_t i = 0; i < 64 * sent.size(); ++i) {
        if (!taken(random)) continue;
        ++count;
        sent[i / 64] |= uint64_t{1} << i % 64;
        negative[i / 64] |= (random() & 1) << i % 64;
      }
      for (const unsigned sign_bits : {0u, 1u}) {
        std::optional<std::vector<uint64_t>> expected;
        for (const KernelTable* table : supported_tables()) {
          std::vector<uint32_t> ends(1 + 64 * sent.size() + kEndSlack);
          ASSERT_EQ(ends_of_signs(*table, sent, negative, std::span(ends).subspan(1)), count);
          const size_t pairs = count / 2;
          std::vector<uint64_t> made(3 * pairs + 1, 7);
          const auto highs = std::span(made).subspan(pairs, pairs);
          const auto high_bits = std::span(made).subspan(2 * pairs, pairs);
          split_gaps(*table, std::span(ends).first(1 + count), low_bits, sign_bits,
                     {std::span(made).first(pairs), highs, high_bits});
          EXPECT_EQ(made.back(), 7u);
          for (size_t p = 0; p < pairs; ++p) {
            if (high_bits[p] == 0) highs[p] = 0;
          }
          made.insert(made.end(), ends.begin(), ends.begin() + static_cast<ptrdiff_t>(1 + count));
          if (!expected) expected = made;
          ASSERT_EQ(made, *expected) << table->isa() << " " << low_bits << " " << share;
        }
      }
    }
  }
}

}  // namespace
}  // namespace smartinf::kernels
