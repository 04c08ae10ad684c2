#include "smartinf/csd/compressed_gradient.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "smartinf/base/units.h"

namespace smartinf::csd {
namespace {

using base::DataType;
using base::ErrorCode;
using base::kBlockElements;

struct Gradient {
  uint64_t elements = 0;
  DataType type = DataType::kBf16;
  bool squares = false;
  std::vector<std::vector<uint32_t>> indices;  // of every block
  std::vector<std::vector<float>> values;
};

/// Values that every type holds exactly.
Gradient random_gradient(uint64_t elements, double share, DataType type, bool squares,
                         uint32_t seed) {
  std::mt19937 random(seed);
  Gradient made{elements, type, squares, {}, {}};
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

float square_of(uint64_t block, uint64_t group) { return static_cast<float>(block * 3 + group); }

std::vector<std::byte> encode(const Gradient& gradient) {
  CompressedWriter writer;
  writer.begin(base::SubgroupId{7}, gradient.elements, gradient.type, gradient.squares);
  for (size_t b = 0; b < gradient.indices.size(); ++b) {
    const uint64_t n = std::min(kBlockElements, gradient.elements - b * kBlockElements);
    std::vector<float> squares(gradient.squares ? base::divide_up(n, kSquaresElements) : 0);
    for (size_t g = 0; g < squares.size(); ++g) squares[g] = square_of(b, g);
    writer.add_block(gradient.indices[b], gradient.values[b], squares);
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
      for (const DataType type : {DataType::kF32, DataType::kBf16, DataType::kF16}) {
        const bool squares = share < 0.5;
        const Gradient gradient = random_gradient(elements, share, type, squares, 5);
        const auto message = encode(gradient);
        uint64_t most = 0;
        for (const auto& block : gradient.indices) most = std::max<uint64_t>(most, block.size());
        EXPECT_LE(message.size(), CompressedWriter::bytes_max(elements, most, type, squares));
        const auto view = CompressedView::parse(message);
        ASSERT_TRUE(view.ok()) << view.status().to_string() << elements << " " << share;
        EXPECT_EQ(view->subgroup().value, 7u);
        EXPECT_EQ(view->elements(), elements);
        EXPECT_EQ(view->type(), type);
        std::vector<std::byte> out(kBlockElements * 4, std::byte{0x55});
        for (uint64_t b = 0; b < view->blocks(); ++b) {
          const uint64_t n = std::min(kBlockElements, elements - b * kBlockElements);
          ASSERT_EQ(view->values(b), gradient.indices[b].size());
          view->expand_block(b, out.data());
          std::vector<float> expected(n, 0.0f);
          for (size_t i = 0; i < gradient.indices[b].size(); ++i) {
            expected[gradient.indices[b][i]] = gradient.values[b][i];
          }
          for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(value_at(out.data(), type, i), expected[i]);
          ASSERT_EQ(view->has_squares(), squares);
          if (!squares) continue;
          std::vector<float> found(base::divide_up(n, kSquaresElements));
          view->squares_of_block(b, found.data());
          for (size_t g = 0; g < found.size(); ++g) {
            ASSERT_EQ(found[g], base::to_f32(base::to_bf16(square_of(b, g))));
          }
        }
      }
    }
  }
}

TEST(CompressedGradient, WorkedExample) {
  // docs/format.md shows these bytes.
  CompressedWriter writer;
  writer.begin(base::SubgroupId{3}, 100, DataType::kBf16, false);
  const std::vector<uint32_t> indices = {4, 40, 41, 99};
  const std::vector<float> values = {1, -2, 0.5f, 4};
  writer.add_block(indices, values, {});
  const auto message = writer.finish();
  // 4 of 100: gaps 4, 35, 0, 57 with 4 low bits.
  const std::vector<uint8_t> section = {0x80, 0x3f, 0x00, 0xc0, 0x00, 0x3f,
                                        0x80, 0x40, 0x89, 0x13, 0x30, 0x01};
  ASSERT_EQ(message.size(), 48 + 8 + section.size());
  EXPECT_EQ(std::memcmp(message.data() + 56, section.data(), section.size()), 0);
}

TEST(CompressedGradient, IsLessThanHalfOfPairs) {
  constexpr uint64_t kElements = 16 * kBlockElements;
  const Gradient gradient = random_gradient(kElements, 0.01, DataType::kBf16, false, 9);
  const double pairs = 8 * 0.01 * static_cast<double>(kElements);
  const auto bytes = static_cast<double>(encode(gradient).size());
  EXPECT_LT(bytes, 0.4 * pairs);
  Gradient wide = random_gradient(kElements, 0.01, DataType::kF32, false, 9);
  EXPECT_LT(static_cast<double>(encode(wide).size()), 0.66 * pairs);
  // With mean squares it is still what is promised: at most 0.04 bytes a parameter.
  const Gradient full = random_gradient(kElements, 0.01, DataType::kBf16, true, 9);
  EXPECT_LT(static_cast<double>(encode(full).size()), 0.04 * static_cast<double>(kElements));
}

TEST(CompressedGradient, RefusesEveryFlippedBitAndEveryCut) {
  const auto message = encode(random_gradient(3000, 0.02, DataType::kBf16, true, 3));
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

/// What a right checksum does not make right.
TEST(CompressedGradient, RefusesWhatIsSealedButWrong) {
  const auto message = encode(random_gradient(2 * kBlockElements, 0.01, DataType::kBf16, false, 3));
  const auto refused = [&](size_t offset, uint64_t value, size_t width, ErrorCode code,
                           const std::string& why) {
    auto damaged = message;
    std::memcpy(damaged.data() + offset, &value, width);
    seal_compressed(damaged);
    const auto view = CompressedView::parse(damaged);
    ASSERT_FALSE(view.ok()) << why;
    EXPECT_EQ(view.status().code(), code);
    EXPECT_NE(view.status().what().find(why), std::string::npos) << view.status().to_string();
  };
  refused(0, 1, 8, ErrorCode::kCorrupt, "begin");
  refused(8, 2, 2, ErrorCode::kMismatch, "version 2");
  refused(10, 3, 1, ErrorCode::kCorrupt, "no meaning");
  refused(11, 2, 1, ErrorCode::kCorrupt, "no meaning");
  refused(16, 0, 8, ErrorCode::kCorrupt, "blocks for");
  refused(16, ~uint64_t{0}, 8, ErrorCode::kCorrupt, "blocks for");
  refused(24, 3, 4, ErrorCode::kCorrupt, "blocks for");
  refused(28, 1, 4, ErrorCode::kCorrupt, "no meaning");
  refused(32, 48, 8, ErrorCode::kCorrupt, "says 48");
  refused(48, 0, 4, ErrorCode::kCorrupt, "block 0");               // its section is empty
  refused(48, ~0u, 4, ErrorCode::kCorrupt, "block 0");             // or ends outside
  refused(52, 654 | 6u << 24, 4, ErrorCode::kCorrupt, "block 0");  // a value less
  refused(52, 656 | 6u << 24, 4, ErrorCode::kCorrupt, "block 0");  // a value more
  refused(52, 655 | 60u << 24, 4, ErrorCode::kCorrupt, "no known form");
  refused(52, 655 | 255u << 24, 4, ErrorCode::kCorrupt, "neither dense");
  refused(56, 1, 4, ErrorCode::kCorrupt, "block 1");  // ends before it begins
  auto longer = message;
  longer.push_back(std::byte{0});
  const uint64_t bytes = longer.size();
  std::memcpy(longer.data() + 32, &bytes, 8);
  seal_compressed(longer);
  EXPECT_FALSE(CompressedView::parse(longer).ok());
}

}  // namespace
}  // namespace smartinf::csd
