#include "smartinf/kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/kernels/attention_arithmetic.h"
#include "smartinf/kernels/test_kernels.h"

namespace smartinf::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

AttentionShape shape_of(uint32_t heads, uint32_t kv_heads, uint32_t width,
                        CacheFormat format = CacheFormat::kBf16, float softcap = 0) {
  return {.block = {.kv_heads = kv_heads, .head_width = width, .format = format},
          .heads = heads,
          .scale = 1.0f / std::sqrt(static_cast<float>(width)),
          .softcap = softcap};
}

/// One sequence: its tokens in f32, already of the type that they are appended in, and its blocks.
struct Sequence {
  Sequence(const AttentionShape& attention, uint32_t count, uint32_t seed, float spread = 1)
      : shape(attention), tokens(count) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const size_t row = size_t{shape.block.kv_heads} * shape.block.head_width;
    for (std::vector<float>* values : {&keys, &this->values}) {
      values->resize(tokens * row);
      for (float& v : *values) v = base::to_f32(base::to_bf16(spread * normal(random)));
    }
    query.resize(size_t{shape.heads} * shape.block.head_width);
    for (float& q : query) q = spread * normal(random);
  }

  void append() {
    const uint64_t bytes = cache_block_bytes(shape.block);
    const size_t row = size_t{shape.block.kv_heads} * shape.block.head_width;
    blocks.assign((tokens + kCacheBlockTokens - 1) / kCacheBlockTokens,
                  std::vector<std::byte>(bytes));
    for (uint32_t t = 0; t < tokens; t += kCacheBlockTokens) {
      append_tokens(shape.block, blocks[t / kCacheBlockTokens], 0,
                    std::min(kCacheBlockTokens, tokens - t), DataType::kF32, keys.data() + t * row,
                    values.data() + t * row);
    }
  }

  /// Folds tokens [first, end) into a state.
  void fold(const KernelTable& table, uint32_t first, uint32_t end, float* state,
            const FoldRange& heads = {}) const {
    const FoldQuery one{query.data(), state};
    for (uint32_t b = first / kCacheBlockTokens; b * kCacheBlockTokens < end; ++b) {
      const uint32_t begin = b * kCacheBlockTokens;
      FoldRange range = heads;
      range.first = std::max(first, begin) - begin;
      range.end = std::min(end - begin, kCacheBlockTokens);
      fold_block(table, shape, blocks[b], range, {&one, 1});
    }
  }

  std::vector<float> begun() const {
    std::vector<float> state(shape.state_floats());
    begin_fold(shape, state.data());
    return state;
  }

  std::vector<float> finished(const std::vector<float>& state) const {
    std::vector<float> out(query.size());
    finish_fold(shape, state.data(), out.data());
    return out;
  }

  std::vector<float> attend(const KernelTable& table, uint32_t first, uint32_t end) const {
    std::vector<float> state = begun();
    fold(table, first, end, state.data());
    return finished(state);
  }

  AttentionShape shape;
  uint32_t tokens;
  std::vector<float> keys, values, query;  // [tokens][kv_heads][d], [heads][d]
  std::vector<std::vector<std::byte>> blocks;
};

/// Attention in double precision by the definition, and how far an f32 fold may be from it.
void expect_near_softmax(const Sequence& s, uint32_t first, uint32_t end,
                         const std::vector<float>& actual, double tolerance) {
  const size_t width = s.shape.block.head_width;
  const size_t kv_heads = s.shape.block.kv_heads;
  for (size_t h = 0; h < s.shape.heads; ++h) {
    const size_t kv = h / s.shape.queries_per_head();
    std::vector<double> scores;
    for (size_t t = first; t < end; ++t) {
      double score = 0;
      for (size_t c = 0; c < width; ++c) {
        score += double{s.query[h * width + c]} * double{s.keys[(t * kv_heads + kv) * width + c]};
      }
      score *= double{s.shape.scale};
      const double cap = s.shape.softcap;
      scores.push_back(cap > 0 ? cap * std::tanh(score / cap) : score);
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& score : scores) sum += score = std::exp(score - max);
    for (size_t c = 0; c < width; ++c) {
      double out = 0;
      double magnitude = 0;
      for (size_t t = first; t < end; ++t) {
        const double term =
            scores[t - first] / sum * double{s.values[(t * kv_heads + kv) * width + c]};
        out += term;
        magnitude += std::fabs(term);
      }
      ASSERT_NEAR(actual[h * width + c], out, tolerance * magnitude)
          << "head " << h << " channel " << c;
    }
  }
}

class Attention : public testing::TestWithParam<const KernelTable*> {
 protected:
  static const KernelTable& table() { return *GetParam(); }
};

// A score is a sum of d products of about 1 each: rounded in f32 it is off by at most d ulps of
// the sum of their magnitudes (of 64: 64 * 2^-24 * 64 / 8 = 3e-5), which becomes the relative error
// of a weight; 300 weighted values add at most 300 * 2^-24 = 2e-5.
constexpr double kTolerance = 6e-5;

TEST_P(Attention, IsSoftmaxOverAllTokensOrThoseOfAWindow) {
  for (const CacheFormat format : {CacheFormat::kBf16, CacheFormat::kF32}) {
    for (const float softcap : {0.0f, 2.0f}) {
      Sequence s(shape_of(6, 2, 64, format, softcap), 300, 1);
      s.append();
      for (const auto& [first, end] :
           {std::pair{0u, 1u}, {0u, 32u}, {0u, 300u}, {37u, 299u}, {33u, 34u}, {290u, 300u}}) {
        expect_near_softmax(s, first, end, s.attend(table(), first, end), kTolerance);
      }
    }
  }
}

TEST_P(Attention, NoTokensAreZeros) {
  Sequence s(shape_of(2, 1, 16), 32, 2);
  s.append();
  const std::vector<float> empty(s.query.size());
  EXPECT_EQ(s.attend(table(), 0, 0), empty);
  EXPECT_EQ(s.attend(table(), 7, 7), empty);
}

INSTANTIATE_TEST_SUITE_P(Isa, Attention, testing::ValuesIn(supported_tables()),
                         [](const auto& table) { return std::string(table.param->isa()); });

// Largest error of exp_of_negative() in ulps, and where it ends.
TEST(ExpOfNegative, IsWithinItsError) {
  double worst = 0;
  for (uint32_t i = 0; i < 2'000'000; ++i) {
    const float x = -87.0f * static_cast<float>(i) / 2e6f;
    const double exact = std::exp(double{x});
    const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
    worst = std::max(worst, std::fabs(double{exp_of_negative(x)} - exact) / ulp);
  }
  EXPECT_LT(worst, 1.1);
  EXPECT_EQ(exp_of_negative(0), 1);
  EXPECT_EQ(exp_of_negative(-0.0f), 1);
  EXPECT_EQ(exp_of_negative(-87.01f), 0);
  EXPECT_EQ(exp_of_negative(-kInfinity), 0);
  EXPECT_GE(exp_of_negative(-87), std::numeric_limits<float>::min());
  EXPECT_TRUE(std::isnan(exp_of_negative(NAN)));
}

}  // namespace
}  // namespace smartinf::kernels
