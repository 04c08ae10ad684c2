#include "smartinf/compress/message.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "smartinf/base/units.h"
#include "smartinf/kernels/signs.h"

namespace smartinf::compress {
namespace {

using base::DataType;
using base::ErrorCode;
using base::kBlockElements;

struct Gradient {
  uint64_t elements = 0;
  ValueEncoding encoding = ValueEncoding::kBf16;
  RowColumnFactors factors;
  std::vector<std::vector<uint32_t>> indices;  // of every block
  std::vector<std::vector<float>> values;
};

/// Values that every type holds exactly.
Gradient random_gradient(uint64_t elements, double share, ValueEncoding encoding, size_t factors,
                         uint32_t seed) {
  std::mt19937 random(seed);
  Gradient made{elements, encoding, {}, {}, {}};
  for (size_t i = 0; i < factors; ++i) made.factors.values.push_back(0.1f * static_cast<float>(i));
  for (size_t left = factors; left > 0; left -= made.factors.runs.back()) {
    made.factors.runs.push_back(static_cast<uint32_t>(std::min(left, left / 3 + 1)));
  }
  for (uint64_t first = 0; first < elements; first += kBlockElements) {
    const auto n = static_cast<uint32_t>(std::min(kBlockElements, elements - first));
    std::vector<uint32_t> all(n);
    std::iota(all.begin(), all.end(), 0u);
    std::vector<uint32_t> taken;
    std::sample(all.begin(), all.end(), std::back_inserter(taken),
                static_cast<size_t>(share * n + 0.5), random);
    std::vector<float> values(taken.size());
    for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 255) - 127);
    made.indices.push_back(taken);
    made.values.push_back(values);
  }
  return made;
}

/// Values as a device sees them: those of the tests as they are, or with the mean of their
/// magnitudes.
std::vector<float> arrived_of(std::vector<float> values, ValueEncoding encoding) {
  if (encoding != ValueEncoding::kSign || values.empty()) return values;
  double sum = 0;
  for (const float value : values) sum += std::abs(value);
  const auto mean = static_cast<float>(sum / static_cast<double>(values.size()));
  for (float& value : values) value = std::copysign(base::to_f32(base::to_bf16(mean)), value);
  return values;
}

std::vector<std::byte> encode(const Gradient& gradient) {
  CompressedWriter writer;
  writer.begin(base::SubgroupId{7}, gradient.elements, gradient.encoding, gradient.factors);
  for (size_t b = 0; b < gradient.indices.size(); ++b) {
    std::vector<float> arrived(gradient.values[b].size());
    writer.add_block(gradient.indices[b], gradient.values[b], arrived);
    EXPECT_EQ(arrived, arrived_of(gradient.values[b], gradient.encoding));
  }
  const auto message = writer.finish();
  return {message.begin(), message.end()};
}

float value_at(const std::byte* out, DataType type, uint64_t i) {
  if (type == DataType::kF32) {
    float value = 0;
    std::memcpy(&value, out + 4 * i, 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, out + 2 * i, 2);
  return type == DataType::kBf16 ? base::to_f32(base::Bf16{bits}) : base::to_f32(base::F16{bits});
}

TEST(CompressedGradient, GivesBackWhatWentIn) {
  for (const uint64_t elements : {uint64_t{1}, uint64_t{2}, uint64_t{255}, uint64_t{1000},
                                  kBlockElements, kBlockElements + 1, 3 * kBlockElements - 7}) {
    for (const double share : {0.0, 0.001, 0.01, 0.3, 0.9, 1.0}) {
      for (const ValueEncoding encoding :
           {ValueEncoding::kF32, ValueEncoding::kBf16, ValueEncoding::kF16, ValueEncoding::kSign}) {
        const size_t factors = share < 0.5 ? 1 + elements / 100 : 0;
        const DataType type = expanded_type(encoding);
        const Gradient gradient = random_gradient(elements, share, encoding, factors, 5);
        const auto message = encode(gradient);
        uint64_t most = 0;
        for (const auto& block : gradient.indices) most = std::max<uint64_t>(most, block.size());
        EXPECT_LE(message.size(), CompressedWriter::bytes_max(
                                      elements, most, encoding,
                                      factors_bytes(factors, gradient.factors.runs.size())));
        const auto view = CompressedView::parse(message);
        ASSERT_TRUE(view.ok()) << view.status().to_string() << elements << " " << share;
        EXPECT_EQ(view->subgroup().value, 7u);
        EXPECT_EQ(view->elements(), elements);
        EXPECT_EQ(view->type(), type);
        ASSERT_EQ(view->factors(), factors);
        ASSERT_EQ(view->runs(), gradient.factors.runs.size());
        uint64_t first_factor = 0;
        for (size_t run = 0; run < gradient.factors.runs.size(); ++run) {
          std::vector<float> found(gradient.factors.runs[run]);
          view->read_factors(run, first_factor, found);
          for (const float factor : found) {
            const float expected_factor = gradient.factors.values[first_factor++];
            ASSERT_NEAR(factor, expected_factor, expected_factor / 16);
            ASSERT_EQ(factor == 0, expected_factor == 0);
          }
        }
        std::vector<std::byte> out(kBlockElements * 4, std::byte{0x55});
        for (uint64_t b = 0; b < view->blocks(); ++b) {
          const uint64_t n = std::min(kBlockElements, elements - b * kBlockElements);
          ASSERT_EQ(view->values(b), gradient.indices[b].size());
          view->expand_block(b, out.data());
          const std::vector<float> arrived = arrived_of(gradient.values[b], encoding);
          std::vector<float> expected(n, 0.0f);
          for (size_t i = 0; i < arrived.size(); ++i) {
            expected[gradient.indices[b][i]] = arrived[i];
          }
          for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(value_at(out.data(), type, i), expected[i]);
        }
      }
    }
  }
}

TEST(CompressedGradient, WorkedExample) {
  // docs/format.md shows these bytes.
  CompressedWriter writer;
  writer.begin(base::SubgroupId{3}, 100, ValueEncoding::kBf16, {});
  const std::vector<uint32_t> indices = {4, 40, 41, 99};
  const std::vector<float> values = {1, -2, 0.5f, 4};
  writer.add_block(indices, values);
  const auto message = writer.finish();
  // 4 of 100: gaps 4, 35, 0, 57; 4 low bits of each, then 0, 2, 0 and 3 zeros and a one each.
  const std::vector<uint8_t> section = {0x80, 0x3f, 0x00, 0xc0, 0x00, 0x3f,
                                        0x80, 0x40, 0x34, 0x90, 0x19, 0x01};
  ASSERT_EQ(message.size(), 48 + 8 + section.size());
  EXPECT_EQ(std::memcmp(message.data() + 56, section.data(), section.size()), 0);
}

TEST(CompressedGradient, WorkedExampleOfSigns) {
  // docs/format.md shows these bytes.
  CompressedWriter writer;
  writer.begin(base::SubgroupId{3}, 100, ValueEncoding::kSign, {});
  const std::vector<uint32_t> indices = {4, 40, 41, 99};
  const std::vector<float> values = {1, -2, 0.5f, 4};
  writer.add_block(indices, values);
  const auto message = writer.finish();
  // 1.875, then the gaps with a sign above the low bits of each.
  const std::vector<uint8_t> section = {0xf0, 0x3f, 0x64, 0x82, 0x04, 0x19, 0x01};
  ASSERT_EQ(message.size(), 48 + 8 + section.size());
  EXPECT_EQ(std::memcmp(message.data() + 56, section.data(), section.size()), 0);
}

TEST(CompressedGradient, SignsFromBitsAreThoseFromAList) {
  for (const uint64_t elements : {uint64_t{20}, uint64_t{1000}, kBlockElements + 100}) {
    for (const double share : {0.0, 0.0005, 0.01, 0.08, 0.3, 0.9}) {
      const Gradient gradient = random_gradient(elements, share, ValueEncoding::kSign, 3, 8);
      CompressedWriter writer;
      writer.begin(base::SubgroupId{7}, elements, ValueEncoding::kSign, gradient.factors);
      for (size_t b = 0; b < gradient.indices.size(); ++b) {
        const uint64_t n = std::min(kBlockElements, elements - b * kBlockElements);
        std::vector<uint64_t> sent(base::divide_up(n, 64));
        std::vector<uint64_t> negative(sent.size());
        double sum = 0;
        for (size_t i = 0; i < gradient.indices[b].size(); ++i) {
          const uint32_t index = gradient.indices[b][i];
          const float value = gradient.values[b][i];
          sent[index / 64] |= uint64_t{1} << index % 64;
          negative[index / 64] |= uint64_t{std::signbit(value)} << index % 64;
          sum += std::abs(value);
        }
        const size_t count = gradient.indices[b].size();
        writer.add_signs(sent, negative, count, kernels::mean_magnitude(sum, count));
      }
      const auto message = writer.finish();
      const auto expected = encode(gradient);
      ASSERT_EQ(message.size(), expected.size()) << elements << " " << share;
      EXPECT_EQ(std::memcmp(message.data(), expected.data(), expected.size()), 0)
          << elements << " " << share;
    }
  }
}

TEST(CompressedGradient, SignsOfEverythingTakeABitEach) {
  const Gradient gradient = random_gradient(kBlockElements + 100, 1.0, ValueEncoding::kSign, 0, 4);
  EXPECT_EQ(encode(gradient).size(), 48 + 2 * 8 + 2 + kBlockElements / 8 + 2 + 13);
}

/// As with values of their own: what is not finite arrives as that.
TEST(CompressedGradient, SignsCarryWhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float value : {kInfinity, -kInfinity, kNan, -kNan, 3.4e38f}) {
    CompressedWriter writer;
    writer.begin(base::SubgroupId{3}, 100, ValueEncoding::kSign, {});
    std::vector<float> arrived(1);
    writer.add_block(std::vector<uint32_t>{9}, std::vector<float>{value}, arrived);
    const auto view = CompressedView::parse(writer.finish());
    ASSERT_TRUE(view.ok()) << view.status().to_string();
    std::vector<base::Bf16> out(100);
    view->expand_block(0, reinterpret_cast<std::byte*>(out.data()));
    for (const float found : {arrived[0], base::to_f32(out[9])}) {
      EXPECT_EQ(std::isnan(found), std::isnan(value));
      EXPECT_FALSE(std::isfinite(found));
      EXPECT_EQ(std::signbit(found), std::signbit(value));
    }
  }
}

/// The longest gaps are one long one; and a block may have fewer values than its bound was made
/// for.
TEST(CompressedGradient, NoBlockIsLongerThanItsBound) {
  for (const uint64_t n : {1, 2, 3, 64, 100, 1000}) {
    for (const ValueEncoding encoding :
         {ValueEncoding::kF32, ValueEncoding::kBf16, ValueEncoding::kSign}) {
      uint64_t longest = 0;
      for (uint64_t k = 0; k <= n; ++k) {
        std::vector<uint32_t> indices(k);
        std::iota(indices.begin(), indices.end(), static_cast<uint32_t>(n - k));
        CompressedWriter writer;
        writer.begin(base::SubgroupId{0}, n, encoding, {});
        writer.add_block(indices, std::vector<float>(k, 1.0f));
        longest = std::max<uint64_t>(longest, writer.finish().size());
        ASSERT_LE(longest, CompressedWriter::bytes_max(n, k, encoding, 0)) << k << " of " << n;
      }
    }
  }
}

TEST(CompressedGradient, IsLessThanHalfOfPairs) {
  constexpr uint64_t kElements = 16 * kBlockElements;
  const Gradient gradient = random_gradient(kElements, 0.01, ValueEncoding::kBf16, 0, 9);
  const double pairs = 8 * 0.01 * static_cast<double>(kElements);
  const auto bytes = static_cast<double>(encode(gradient).size());
  EXPECT_LT(bytes, 0.4 * pairs);
  Gradient wide = random_gradient(kElements, 0.01, ValueEncoding::kF32, 0, 9);
  EXPECT_LT(static_cast<double>(encode(wide).size()), 0.66 * pairs);
  // With factors of a matrix as wide as it is high it is still what is promised: at most 0.04 bytes
  // a parameter.
  const Gradient full = random_gradient(kElements, 0.01, ValueEncoding::kBf16, 2048, 9);
  EXPECT_LT(static_cast<double>(encode(full).size()), 0.04 * static_cast<double>(kElements));
  // And signs are less than the byte each that the ratio counts them as.
  const Gradient signs = random_gradient(kElements, 0.08, ValueEncoding::kSign, 2048, 9);
  EXPECT_LT(static_cast<double>(encode(signs).size()), 0.07 * static_cast<double>(kElements));
  // Also of a matrix that is 14336 wide.
  const Gradient broad = random_gradient(kElements, 0.08, ValueEncoding::kSign, 14336 + 75, 9);
  EXPECT_LT(static_cast<double>(encode(broad).size()), 0.08 * static_cast<double>(kElements));
}

TEST(CompressedGradient, RefusesEveryFlippedBitAndEveryCut) {
  for (const ValueEncoding encoding : {ValueEncoding::kBf16, ValueEncoding::kSign}) {
    const auto message = encode(random_gradient(3000, 0.02, encoding, 20, 3));
    ASSERT_TRUE(CompressedView::parse(message).ok());
    for (size_t bit = 0; bit < message.size() * 8; ++bit) {
      auto damaged = message;
      damaged[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
      ASSERT_FALSE(CompressedView::parse(damaged).ok()) << "bit " << bit;
    }
    for (size_t length = 0; length < message.size(); ++length) {
      ASSERT_FALSE(CompressedView::parse(std::span(message).first(length)).ok()) << length;
    }
  }
}

void refused(std::span<const std::byte> message, size_t offset, uint64_t value, size_t width,
             ErrorCode code, const std::string& why) {
  std::vector<std::byte> damaged(message.begin(), message.end());
  std::memcpy(damaged.data() + offset, &value, width);
  seal_compressed(damaged);
  const auto view = CompressedView::parse(damaged);
  ASSERT_FALSE(view.ok()) << why;
  EXPECT_EQ(view.status().code(), code);
  EXPECT_NE(view.status().what().find(why), std::string::npos) << view.status().to_string();
}

/// A message with a right checksum can still be wrong.
TEST(CompressedGradient, RefusesWhatIsSealedButWrong) {
  const auto message =
      encode(random_gradient(2 * kBlockElements, 0.01, ValueEncoding::kBf16, 0, 3));
  refused(message, 0, 1, 8, ErrorCode::kCorrupt, "begin");
  refused(message, 8, 5, 2, ErrorCode::kMismatch, "version 5");
  refused(message, 8, 3, 2, ErrorCode::kMismatch, "version 3");
  refused(message, 10, 4, 1, ErrorCode::kCorrupt, "an unknown value");
  refused(message, 11, 1, 1, ErrorCode::kCorrupt, "an unknown value");
  refused(message, 16, 0, 8, ErrorCode::kCorrupt, "too short for 0 elements");
  refused(message, 16, ~uint64_t{0}, 8, ErrorCode::kCorrupt, "too short for");
  refused(message, 16, 3 * kBlockElements, 8, ErrorCode::kCorrupt, "refused");
  refused(message, 24, 3, 4, ErrorCode::kCorrupt, "factors, and the message 0");
  refused(message, 24, ~0u, 4, ErrorCode::kCorrupt, "4294967295 runs");
  refused(message, 28, ~0u, 4, ErrorCode::kCorrupt, "4294967295 factors");
  refused(message, 32, 48, 8, ErrorCode::kCorrupt, "says 48");
  refused(message, 48, 0, 4, ErrorCode::kCorrupt, "block 0");               // its section is empty
  refused(message, 48, ~0u, 4, ErrorCode::kCorrupt, "block 0");             // or ends outside
  refused(message, 52, 654 | 6u << 24, 4, ErrorCode::kCorrupt, "block 0");  // a value less
  refused(message, 52, 656 | 6u << 24, 4, ErrorCode::kCorrupt, "block 0");  // a value more
  refused(message, 52, 655 | 60u << 24, 4, ErrorCode::kCorrupt, "an unknown encoding");
  refused(message, 52, 655 | 255u << 24, 4, ErrorCode::kCorrupt, "neither dense");
  refused(message, 56, 1, 4, ErrorCode::kCorrupt, "block 1");  // ends before it begins
  auto longer = message;
  longer.push_back(std::byte{0});
  const uint64_t bytes = longer.size();
  std::memcpy(longer.data() + 32, &bytes, 8);
  seal_compressed(longer);
  EXPECT_FALSE(CompressedView::parse(longer).ok());
}

TEST(CompressedGradient, RefusesFactorsThatAreSealedButWrong) {
  // Runs of 2, 2 and 1; the first entry is at 56.
  const auto message = encode(random_gradient(1000, 0.01, ValueEncoding::kBf16, 5, 3));
  refused(message, 59, 30, 1, ErrorCode::kCorrupt, "run 0");   // ends below the smallest f32
  refused(message, 63, 255, 1, ErrorCode::kCorrupt, "run 1");  // goes up to infinity
  refused(message, 64, 0, 3, ErrorCode::kCorrupt, "run 2");    // is empty
  refused(message, 60, 3, 3, ErrorCode::kCorrupt, "have 6 factors, and the message 5");
  refused(message, 28, 4, 4, ErrorCode::kCorrupt, "have 5 factors, and the message 4");
}

TEST(CompressedGradient, FactorsAreRoundedToTheNearestByte) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float largest = std::ldexp(1.875f, 127);
  const RowColumnFactors factors{
      .values = {1.0f, 1.06f, 1.07f, 1.99f, 0, std::ldexp(1.5f, -30), 1e-12f,  // of one scale
                 3.4e38f, kInfinity, 0,                                        // to the largest
                 std::ldexp(1.0f, -127), 1e-45f,                               // to the smallest
                 0, 0},
      .runs = {7, 3, 2, 2}};
  const std::vector<float> expected = {1.0f,
                                       1.0f,
                                       1.125f,
                                       2.0f,
                                       0,
                                       std::ldexp(1.5f, -30),
                                       std::ldexp(1.125f, -30),
                                       largest,
                                       largest,
                                       0,
                                       std::ldexp(1.0f, -127),
                                       0,
                                       0,
                                       0};
  CompressedWriter writer;
  writer.begin(base::SubgroupId{3}, 100, ValueEncoding::kBf16, factors);
  writer.add_block({}, {});
  const auto view = CompressedView::parse(writer.finish());
  ASSERT_TRUE(view.ok()) << view.status().to_string();
  std::vector<float> found(factors.values.size());
  uint64_t first = 0;
  for (size_t run = 0; run < factors.runs.size(); first += factors.runs[run++]) {
    view->read_factors(run, first, std::span(found).subspan(first, factors.runs[run]));
  }
  EXPECT_EQ(found, expected);
}

TEST(CompressedGradient, RefusesSignsThatAreSealedButWrong) {
  constexpr auto kCorrupt = ErrorCode::kCorrupt;
  // The worked example: 4 of 100, 4 low bits; the section begins at 56 and has 7 bytes.
  Gradient gradient{100, ValueEncoding::kSign, {}, {{4, 40, 41, 99}}, {{1, -2, 0.5f, 4}}};
  const auto sparse = encode(gradient);
  refused(sparse, 52, 3 | 4u << 24, 4, kCorrupt, "more or fewer than values");
  refused(sparse, 52, 5 | 4u << 24, 4, kCorrupt, "more or fewer than values");
  refused(sparse, 52, 4 | 5u << 24, 4, kCorrupt, "indices that leave it");
  refused(sparse, 52, 4 | 17u << 24, 4, kCorrupt, "an unknown encoding");
  refused(sparse, 52, 100 | 255u << 24, 4, kCorrupt, "neither dense");
  refused(sparse, 56, 0xbff0, 2, kCorrupt, "a magnitude with a sign");
  refused(sparse, 56, 0x8000, 2, kCorrupt, "a magnitude with a sign");
  refused(sparse, 60, 0x14, 1, kCorrupt, "more or fewer than values");  // padding of low bits
  refused(sparse, 61, 0x09, 1, kCorrupt, "more or fewer than values");  // an index less
  refused(sparse, 62, 0x03, 1, kCorrupt, "more or fewer than values");  // one more
  refused(sparse, 62, 0x80, 1, kCorrupt, "indices that leave it");
  refused(sparse, 48, 1, 4, kCorrupt, "does not fit");
  refused(sparse, 10, 1, 1, kCorrupt, "does not fit");  // as values they would be longer

  gradient.indices[0].resize(100);
  std::iota(gradient.indices[0].begin(), gradient.indices[0].end(), 0u);
  gradient.values[0].assign(100, -1.0f);
  const auto dense = encode(gradient);  // 13 bytes of signs, the last with 4
  ASSERT_EQ(dense.size(), 56 + 2 + 13u);
  refused(dense, 52, 99 | 255u << 24, 4, kCorrupt, "neither dense");
  refused(dense, 52, 100, 4, kCorrupt, "more or fewer than values");
  refused(dense, 70, 0x1f, 1, kCorrupt, "after its last sign");
  refused(dense, 48, 14, 4, kCorrupt, "neither dense");
}

}  // namespace
}  // namespace smartinf::compress
