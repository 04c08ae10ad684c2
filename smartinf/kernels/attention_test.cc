#include "smartinf/kernels/attention.h"

#include <algorithm>
#include <array>
#include <bit>
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
    for (std::vector<float>* made : {&keys, &values}) {
      made->resize(tokens * row);
      for (float& v : *made) v = base::to_f32(base::to_bf16(spread * normal(random)));
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

constexpr std::array kCacheFormats = {CacheFormat::kBf16, CacheFormat::kF32, CacheFormat::kQ8};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Strews in what arithmetic can trip over.
void make_wild(std::vector<float>& values, uint32_t seed) {
  std::mt19937 random(seed);
  constexpr std::array kOdd = {kInfinity, -kInfinity, NAN, 0.0f, -0.0f, 1e-41f, 3e38f, -3e38f};
  for (size_t i = random() % 97; i < values.size(); i += 1 + random() % 97) {
    values[i] = kOdd[random() % kOdd.size()];
  }
}

TEST_P(Attention, HasTheBitsOfTheScalarTruth) {
  for (const CacheFormat format : kCacheFormats) {
    for (const uint32_t width : {5u, 16u, 64u, 80u, 96u, 112u, 128u, 200u, 256u}) {
      for (const uint32_t group : {1u, 2u, 3u, 4u, 7u}) {
        for (const bool wild : {false, true}) {
          Sequence s(shape_of(2 * group, 2, width, format, group == 2 ? 3.0f : 0.0f), 70,
                     width + group, width % 3 == 0 ? 3.0f : 1.0f);
          if (wild) make_wild(group % 2 == 0 ? s.keys : s.values, group);
          if (wild && group == 1) make_wild(s.query, 1);
          s.append();
          std::vector<float> expected = s.begun();
          std::vector<float> actual = s.begun();
          for (const auto& [first, end] :
               {std::pair{0u, 32u}, {32u, 49u}, {49u, 50u}, {50u, 70u}}) {
            s.fold(scalar(), first, end, expected.data());
            s.fold(table(), first, end, actual.data());
            ASSERT_TRUE(same_bits(actual, expected))
                << base::enum_name(format) << " width " << width << " group " << group
                << " tokens [" << first << ", " << end << ")" << (wild ? " wild" : "");
          }
        }
      }
    }
  }
}

TEST_P(Attention, MayStopAtEachBlockBoundaryAndGoOn) {
  Sequence s(shape_of(4, 2, 32, CacheFormat::kQ8), 170, 3);
  s.append();
  std::vector<float> at_once = s.begun();
  s.fold(table(), 5, 170, at_once.data());
  for (uint32_t boundary = 32; boundary < 170; boundary += 32) {
    std::vector<float> state = s.begun();
    s.fold(table(), 5, boundary, state.data());
    const std::vector<float> elsewhere = state;  // floats are all that there is of it
    std::vector<float> went_on = elsewhere;
    s.fold(scalar(), boundary, 170, went_on.data());
    EXPECT_TRUE(same_bits(went_on, at_once)) << boundary;
  }
}

TEST_P(Attention, QueriesAndHeadsDoNotKnowEachOther) {
  const AttentionShape shape = shape_of(6, 3, 48);
  Sequence s(shape, 32, 4);
  s.append();
  std::vector<std::vector<float>> queries, states, alone;
  std::vector<FoldQuery> all;
  for (uint32_t q = 0; q < 5; ++q) {
    queries.push_back(Sequence(shape, 0, 100 + q).query);
    states.push_back(s.begun());
    alone.push_back(s.begun());
  }
  for (uint32_t q = 0; q < 5; ++q) {
    all.push_back({queries[q].data(), states[q].data()});
    const FoldQuery one{queries[q].data(), alone[q].data()};
    for (const uint32_t head : {2u, 0u, 1u}) {
      fold_block(table(), shape, s.blocks[0], {.first_head = head, .end_head = head + 1},
                 {&one, 1});
    }
  }
  fold_block(table(), shape, s.blocks[0], {}, all);
  for (uint32_t q = 0; q < 5; ++q) EXPECT_TRUE(same_bits(states[q], alone[q])) << q;
}

// Infinities and NaN stay in the head of keys that has them, and out of it where its tokens are
// not seen.
TEST_P(Attention, BrokenNumbersDoNotSpread) {
  for (const CacheFormat format : kCacheFormats) {
    for (const float broken : {kInfinity, -kInfinity, NAN}) {
      Sequence s(shape_of(4, 2, 16, format), 64, 5);
      s.append();
      const std::vector<float> sound = s.attend(table(), 0, 64);
      const std::vector<float> sound_later = s.attend(table(), 40, 64);
      for (std::vector<float>* where : {&s.keys, &s.values}) {
        const std::vector<float> before = *where;
        (*where)[39 * 32 + 16 + 3] = broken;  // token 39, head 1, channel 3
        s.append();
        const std::vector<float> actual = s.attend(table(), 0, 64);
        EXPECT_TRUE(std::equal(sound.begin(), sound.begin() + 32, actual.begin()));
        EXPECT_TRUE(same_bits(s.attend(table(), 40, 64), sound_later));
        if (where == &s.values) {
          EXPECT_FALSE(std::isfinite(actual[32 + 3]));
          if (format != CacheFormat::kQ8) {
            EXPECT_EQ(actual[32 + 2], sound[32 + 2]);
          }
        }
        *where = before;
      }
    }
  }
}

TEST_P(Attention, KeysThatGiveMinusInfinityHaveNoWeight) {
  Sequence s(shape_of(1, 1, 16, CacheFormat::kF32), 40, 6);
  std::fill(s.query.begin(), s.query.end(), 1.0f);
  for (const uint32_t t : {0u, 7u, 33u}) s.keys[t * 16] = -kInfinity;
  for (uint32_t c = 0; c < 16; ++c) s.values[7 * 16 + c] = 1e30f;
  s.append();
  const std::vector<float> actual = s.attend(table(), 0, 40);
  for (const float value : actual) EXPECT_LT(std::fabs(value), 4.0f);
  // Alone, they leave the state as empty as it was.
  EXPECT_EQ(s.attend(table(), 7, 8), std::vector<float>(16));
}

INSTANTIATE_TEST_SUITE_P(Isa, Attention, testing::ValuesIn(supported_tables()),
                         [](const auto& table) { return std::string(table.param->isa()); });

TEST(CacheBlock, IsWholePagesAndPaddedWithZeros) {
  EXPECT_EQ(cache_block_bytes({8, 64, CacheFormat::kBf16}), 64u << 10);    // Llama 3.2 1B
  EXPECT_EQ(cache_block_bytes({8, 128, CacheFormat::kBf16}), 128u << 10);  // Llama 3 8B
  EXPECT_EQ(cache_block_bytes({12, 64, CacheFormat::kBf16}), 96u << 10);   // GPT-2
  EXPECT_EQ(cache_block_bytes({8, 128, CacheFormat::kF32}), 256u << 10);
  EXPECT_EQ(cache_block_bytes({8, 128, CacheFormat::kQ8}), (64u << 10) + 4096);  // 2 KiB of scales
  EXPECT_EQ(cache_block_bytes({1, 5, CacheFormat::kBf16}), 4096u);
}

TEST(CacheBlock, HasKeysByChannelAndValuesByToken) {
  const CacheBlockShape shape{2, 3, CacheFormat::kF32};
  std::vector<std::byte> block(cache_block_bytes(shape));
  std::vector<float> keys(2 * 6), values(2 * 6);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<float>(1 + i);
    values[i] = static_cast<float>(101 + i);
  }
  append_tokens(shape, block, 30, 2, DataType::kF32, keys.data(), values.data());
  const auto* floats = reinterpret_cast<const float*>(block.data());
  const size_t head = 2 * 3 * kCacheBlockTokens;
  EXPECT_EQ(floats[head + 2 * kCacheBlockTokens + 31], 12);           // K, head 1, channel 2
  EXPECT_EQ(floats[head + 3 * kCacheBlockTokens + 31 * 3 + 2], 112);  // V of the same
  EXPECT_EQ(std::count(floats, floats + block.size() / 4, 0.0f), block.size() / 4 - 24);
}

TEST(CacheBlock, TokenByTokenIsAllAtOnce) {
  for (const CacheFormat format : kCacheFormats) {
    for (const DataType type : {DataType::kF32, DataType::kBf16}) {
      const CacheBlockShape shape{3, 20, format};
      const size_t row = 3 * 20;
      Sequence s({.block = shape, .heads = 3}, 29, 7, 2);
      make_wild(s.values, 7);
      std::vector<base::Bf16> keys, values;
      for (const float k : s.keys) keys.push_back(base::to_bf16(k));
      for (const float v : s.values) values.push_back(base::to_bf16(v));
      const bool wide = type == DataType::kF32;
      const auto append = [&](std::vector<std::byte>& block, uint32_t first, uint32_t count) {
        const size_t at = first * row;
        append_tokens(shape, block, first, count, type,
                      wide ? static_cast<const void*>(s.keys.data() + at) : keys.data() + at,
                      wide ? static_cast<const void*>(s.values.data() + at) : values.data() + at);
      };
      std::vector<std::byte> once(cache_block_bytes(shape)), one_by_one(once.size());
      append(once, 0, 29);
      for (uint32_t t = 0; t < 29; ++t) append(one_by_one, t, 1);
      EXPECT_EQ(once, one_by_one) << base::enum_name(format);
    }
  }
}

TEST(CacheBlock, RowsMayBeAPartOfLongerOnes) {
  const CacheBlockShape shape{2, 8, CacheFormat::kBf16};
  Sequence s({.block = {6, 8, CacheFormat::kBf16}, .heads = 6}, 4, 8);  // q, k and v side by side
  std::vector<float> keys, values;
  for (uint32_t t = 0; t < 4; ++t) {
    keys.insert(keys.end(), s.keys.begin() + t * 48 + 16, s.keys.begin() + t * 48 + 32);
    values.insert(values.end(), s.keys.begin() + t * 48 + 32, s.keys.begin() + t * 48 + 48);
  }
  std::vector<std::byte> parts(cache_block_bytes(shape)), whole(parts.size());
  append_tokens(shape, whole, 0, 4, DataType::kF32, keys.data(), values.data());
  append_tokens(shape, parts, 0, 4, DataType::kF32, s.keys.data() + 16, s.keys.data() + 32, 48);
  EXPECT_EQ(parts, whole);
}

// Nearest codes: each value is off by at most half of its row's scale, which is a 127th of the
// largest, and by the roundings of the scale and the product (127 * 2^-23 of it).
TEST(CacheBlock, EightBitsAreOffByHalfOfTheScale) {
  const CacheBlockShape shape{1, 64, CacheFormat::kQ8};
  Sequence s({.block = shape, .heads = 1}, 32, 9);
  for (size_t i = 0; i < s.keys.size(); ++i)
    s.keys[i] *= std::pow(10.0f, static_cast<float>(i / 64 % 13) - 6);
  s.append();
  const auto* codes = reinterpret_cast<const int8_t*>(s.blocks[0].data());
  const auto* scales = reinterpret_cast<const float*>(s.blocks[0].data() + 2 * 64 * 32);
  for (uint32_t t = 0; t < 32; ++t) {
    float largest = 0;
    for (uint32_t c = 0; c < 64; ++c) largest = std::max(largest, std::fabs(s.keys[t * 64 + c]));
    EXPECT_FLOAT_EQ(scales[t] * 127, largest);
    for (uint32_t c = 0; c < 64; ++c) {
      const float value = s.keys[t * 64 + c];
      const float decoded = static_cast<float>(codes[c * 32 + t]) * scales[t];
      EXPECT_LE(std::fabs(decoded - value), scales[t] * 0.50002f) << "token " << t;
      const float v_decoded = static_cast<float>(codes[64 * 32 + t * 64 + c]) * scales[32 + t];
      EXPECT_LE(std::fabs(v_decoded - s.values[t * 64 + c]), scales[32 + t] * 0.50002f);
    }
  }
}

TEST(CacheBlock, RowsOfEightBitsThatHaveNoScale) {
  EXPECT_EQ(row_scale(0), 0);
  EXPECT_EQ(row_scale(std::bit_cast<uint32_t>(1e-41f)), 0);
  EXPECT_TRUE(std::isnan(row_scale(kInfinityBits)));
  EXPECT_TRUE(std::isnan(row_scale(kCanonicalNan)));
  EXPECT_EQ(row_code(1e-41f, group_inverse(0)), 0);
  EXPECT_EQ(row_code(INFINITY, group_inverse(row_scale(kInfinityBits))), 0);
}

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
