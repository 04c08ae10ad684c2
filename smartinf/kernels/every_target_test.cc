// Every instruction set this machine has against the scalar truth: the same bits for every length
// from nothing to beyond four vectors, every misalignment, and every kind of number there is.
#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/kernels/test_kernels.h"

namespace smartinf::kernels {
namespace {

bool same_bits(const float* a, const float* b, size_t n) {
  return n == 0 || std::memcmp(a, b, n * sizeof(float)) == 0;
}

constexpr std::array kTypes = {DataType::kF32, DataType::kBf16, DataType::kF16};
// Every format of moments and of master weights; moments know nothing of the master weights.
constexpr std::array kFormats = {StateFormat::kF32,
                                 StateFormat::kBf16,
                                 StateFormat::kQ8,
                                 StateFormat{MomentFormat::kF32, MasterFormat::kBf16},
                                 StateFormat{MomentFormat::kQ8, MasterFormat::kM24},
                                 StateFormat{MomentFormat::kQ4, MasterFormat::kM24}};
constexpr size_t kLengthMax = 4 * 16 + 1;  // four of the widest vectors, and one more

/// Numbers as they come, with zeros, denormals, infinities and NaN strewn in.
std::vector<float> wild_values(size_t n, uint32_t seed, bool only_positive = false) {
  std::mt19937 random(seed);
  std::normal_distribution<float> usual(0, 1);
  std::vector<float> values(n);
  for (float& value : values) {
    const uint32_t kind = random() % 16;
    if (kind < 10) {
      value = usual(random);
    } else if (kind < 12) {
      value = usual(random) * 1e-41f;  // denormal
    } else if (kind == 12) {
      value = (random() & 1) != 0 ? 0.0f : -0.0f;
    } else {
      value = std::bit_cast<float>(static_cast<uint32_t>(random()));  // anything, NaN included
    }
    if (only_positive) value = std::fabs(value);
  }
  return values;
}

std::vector<float> tame_values(size_t n, uint32_t seed, bool only_positive = false) {
  std::mt19937 random(seed);
  std::normal_distribution<float> usual(0, 1);
  std::vector<float> values(n);
  for (float& value : values) {
    value = usual(random) * std::exp(3 * usual(random));
    if (only_positive) value = std::fabs(value);
  }
  return values;
}

/// Tiles of every kind next to each other: usual ones, zeros, magnitudes over 30 decades, ones with
/// an infinity or a NaN in them.
std::vector<float> tiles_of_all_kinds(size_t n, uint32_t seed, bool only_positive = false) {
  std::vector<float> values = tame_values(n, seed, only_positive);
  std::mt19937 random(seed);
  for (size_t first = 0; first < n; first += kTileElements) {
    const size_t last = std::min(n, first + kTileElements);
    const auto kind = random() % 10;
    for (size_t i = first; i < last; ++i) {
      if (kind == 5) values[i] = 0.0f;
      if (kind == 6 || kind == 7) values[i] *= std::pow(10.0f, -static_cast<float>(i % 30));
    }
    if (kind == 8) values[first + random() % (last - first)] = INFINITY;
    if (kind == 9) values[first + random() % (last - first)] = NAN;
  }
  return values;
}

using Values = std::vector<float> (*)(size_t n, uint32_t seed, bool only_positive);

class EveryTarget : public testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& truth() const { return scalar(); }
  const KernelTable& table() const { return *GetParam(); }
};

// Element-wise misalignment: buffers start `shift` elements into 64-byte aligned memory.
TEST_P(EveryTarget, CastsAgree) {
  for (const DataType type : kTypes) {
    const size_t width = base::data_type_bytes(type);
    for (size_t n = 0; n <= kLengthMax; ++n) {
      for (size_t shift = 0; shift < 16; ++shift) {
        const std::vector<float> in = wild_values(n + shift, static_cast<uint32_t>(n * 16 + shift));
        std::vector<std::byte> expected((n + shift) * width, std::byte{0xee});
        std::vector<std::byte> actual = expected;
        truth().cast_from_f32(in.data() + shift, expected.data() + shift * width, type, n);
        table().cast_from_f32(in.data() + shift, actual.data() + shift * width, type, n);
        ASSERT_EQ(actual, expected) << base::data_type_name(type) << " n " << n << " at " << shift;

        std::vector<float> expected_wide(n + shift);
        std::vector<float> actual_wide(n + shift);
        truth().cast_to_f32(actual.data() + shift * width, type, expected_wide.data() + shift, n);
        table().cast_to_f32(actual.data() + shift * width, type, actual_wide.data() + shift, n);
        ASSERT_TRUE(same_bits(actual_wide.data(), expected_wide.data(), n + shift))
            << base::data_type_name(type) << " n " << n << " at " << shift;
      }
    }
  }
}

TEST_P(EveryTarget, WidensEveryHalf) {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> expected(halves.size());
  std::vector<float> actual(halves.size());
  for (const DataType type : {DataType::kBf16, DataType::kF16}) {
    truth().cast_to_f32(halves.data(), type, expected.data(), halves.size());
    table().cast_to_f32(halves.data(), type, actual.data(), halves.size());
    ASSERT_EQ(std::memcmp(actual.data(), expected.data(), halves.size() * 4), 0);
  }
}

// Every exponent and sign with every pattern of the bits that decide a rounding.
TEST_P(EveryTarget, NarrowsEveryRounding) {
  std::vector<float> in;
  for (uint32_t top = 0; top < 512; ++top) {
    for (uint32_t kept = 0; kept < 16; ++kept) {
      for (const uint32_t rest : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu, 0x2000u, 0x3000u,
                                  0x7fffu, 0x8000u, 0x8001u, 0xffffu, 0x18000u, 0x7fffffu}) {
        in.push_back(std::bit_cast<float>((top << 23) | (kept << 19) | rest));
      }
    }
  }
  for (const DataType type : {DataType::kBf16, DataType::kF16}) {
    std::vector<uint16_t> expected(in.size());
    std::vector<uint16_t> actual(in.size());
    truth().cast_from_f32(in.data(), expected.data(), type, in.size());
    table().cast_from_f32(in.data(), actual.data(), type, in.size());
    for (size_t i = 0; i < in.size(); ++i) {
      ASSERT_EQ(actual[i], expected[i]) << std::hex << std::bit_cast<uint32_t>(in[i]);
    }
  }
}

TEST_P(EveryTarget, NormsAgree) {
  for (const DataType type : kTypes) {
    const size_t width = base::data_type_bytes(type);
    for (size_t n = 0; n < 20000; n = n < 2 * kLengthMax ? n + 1 : n * 5 / 4) {
      for (size_t shift = 0; shift < (n < kLengthMax ? 16u : 2u); ++shift) {
        std::vector<float> in = tame_values(n, static_cast<uint32_t>(n));
        std::vector<std::byte> narrow((n + shift) * width);
        truth().cast_from_f32(in.data(), narrow.data() + shift * width, type, n);
        const KernelTable::Norm expected =
            truth().partial_norm(narrow.data() + shift * width, type, n);
        const KernelTable::Norm actual =
            table().partial_norm(narrow.data() + shift * width, type, n);
        ASSERT_EQ(actual.sum_of_squares, expected.sum_of_squares) << n;
        ASSERT_EQ(actual.finite, expected.finite);
        ASSERT_EQ(actual.first_bad, expected.first_bad);
      }
    }
  }
}

TEST_P(EveryTarget, CodecsAgree) {
  for (const Encoding encoding :
       {Encoding::kF32, Encoding::kBf16, Encoding::kQ8, Encoding::kM24, Encoding::kQ4}) {
    const bool of_moments = encoding == Encoding::kQ8 || encoding == Encoding::kQ4;
    for (const PlaneKind kind : {PlaneKind::kMaster, PlaneKind::kMomentum, PlaneKind::kVariance}) {
      if (kind == PlaneKind::kMaster ? of_moments : encoding == Encoding::kM24) continue;
      for (const bool wild : {false, true}) {
        for (size_t n = 0; n < 2000; n = n < kLengthMax + 256 ? n + 1 : n + 97) {
          const bool positive = kind == PlaneKind::kVariance && n % 3 != 0;
          const std::vector<float> in = wild ? wild_values(n, static_cast<uint32_t>(n), positive)
                                             : tame_values(n, static_cast<uint32_t>(n), positive);
          for (const size_t shift : {n % 16, (n + 5) % 16, (n + 10) % 16}) {
            std::vector<float> shifted(shift + n);
            std::copy(in.begin(), in.end(), shifted.begin() + static_cast<ptrdiff_t>(shift));
            const size_t start = 4 * shift;  // planes are aligned to 4 bytes
            std::vector<std::byte> expected(start + base::encoded_bytes(encoding, n),
                                            std::byte{0xee});
            std::vector<std::byte> actual = expected;
            truth().encode_block(encoding, kind, in.data(), expected.data() + start, n, 256 * 7, 3,
                                 5);
            table().encode_block(encoding, kind, shifted.data() + shift, actual.data() + start, n,
                                 256 * 7, 3, 5);
            ASSERT_EQ(actual, expected)
                << base::encoding_name(encoding) << " n " << n << " shift " << shift;

            std::vector<float> expected_out(shift + n);
            std::vector<float> actual_out(shift + n);
            truth().decode_block(encoding, kind, expected.data() + start,
                                 expected_out.data() + shift, n);
            table().decode_block(encoding, kind, expected.data() + start, actual_out.data() + shift,
                                 n);
            ASSERT_TRUE(same_bits(actual_out.data(), expected_out.data(), shift + n))
                << base::encoding_name(encoding) << " n " << n << " shift " << shift;
          }
        }
      }
    }
  }
}

/// A block with everything an update touches, in memory that is misaligned by `shift` elements.
struct Block {
  Block(UpdateRule rule, StateFormat format, DataType gradient_type, DataType weights_type,
        size_t n, size_t shift, Values values_of, bool squares)
      : rule_(rule),
        format_(format),
        gradient_type_(gradient_type),
        weights_type_(weights_type),
        n_(n),
        shift_(shift) {
    const KernelTable& truth = scalar();
    uint32_t seed = static_cast<uint32_t>(n * 131 + shift * 7 + static_cast<size_t>(rule));
    for (const PlaneKind kind : rule_planes(rule)) {
      const bool positive = kind == PlaneKind::kVariance;
      const std::vector<float> values = values_of(n, ++seed, positive);
      const Encoding encoding = base::plane_encoding(format, kind);
      std::vector<std::byte>& plane =
          planes_.emplace_back(base::encoded_bytes(encoding, n) + 4 * shift, std::byte{0xee});
      truth.encode_block(encoding, kind, values.data(), plane.data() + 4 * shift, n, 0, 1, 1);
    }
    const std::vector<float> wide = values_of(n, ++seed, false);
    gradient_.resize((n + shift) * base::data_type_bytes(gradient_type));
    truth.cast_from_f32(wide.data(), gradient(), gradient_type, n);
    if (squares) {
      // Rows of a matrix that the block begins in the middle of.
      columns_ = values_of(kColumns, ++seed, true);
      const std::vector<float> means = values_of(n / kColumns + 2, ++seed, true);
      uint64_t column = seed % kColumns;
      for (uint64_t done = 0; done < n; done += rows_.back().count, column = 0) {
        rows_.push_back({std::min<uint64_t>(n - done, kColumns - column), means[rows_.size()],
                         columns_.data() + column});
      }
    }
    weights_.assign((n + shift) * base::data_type_bytes(weights_type), std::byte{0xee});
  }

  void* gradient() { return gradient_.data() + shift_ * base::data_type_bytes(gradient_type_); }

  void update(const KernelTable& table, std::span<const ScalarsSpan> runs) {
    UpdateBlock block{
        .count = n_,
        .element = 256 * 1234567,
        .gradient = gradient(),
        .gradient_type = gradient_type_,
        .second_moment = rows_,
        .weights_out = weights_.data() + shift_ * base::data_type_bytes(weights_type_),
        .weights_type = weights_type_};
    for (size_t i = 0; i < planes_.size(); ++i) block.planes[i] = planes_[i].data() + 4 * shift_;
    table.update_block(format_, block, runs);
  }

  UpdateRule rule_;
  StateFormat format_;
  DataType gradient_type_;
  DataType weights_type_;
  size_t n_;
  size_t shift_;
  std::vector<std::vector<std::byte>> planes_;
  std::vector<std::byte> gradient_;
  std::vector<std::byte> weights_;
  static constexpr uint64_t kColumns = 77;
  std::vector<float> columns_;
  std::vector<SecondMomentRow> rows_;
};

/// Runs the same steps on the truth and on the table and compares every byte after each.
void expect_same(const KernelTable& table, const RuleOptions& options, StateFormat format,
                 DataType gradient_type, DataType weights_type, size_t n, size_t shift,
                 Values values, const std::string& what, bool squares = false) {
  Block expected(options.rule, format, gradient_type, weights_type, n, shift, values, squares);
  Block actual(options.rule, format, gradient_type, weights_type, n, shift, values, squares);
  for (uint64_t step = 1; step <= 3; ++step) {
    const StepScalars first =
        make_step_scalars(options, {.lr = 1e-2, .weight_decay = 0.1}, step, 0.7, 11);
    const StepScalars second = make_step_scalars(options, {.lr = 3e-3}, step, 0.7, 11);
    const std::array runs = {ScalarsSpan{n / 3, &first}, ScalarsSpan{n - n / 3, &second}};
    expected.update(scalar(), runs);
    actual.update(table, runs);
    for (size_t i = 0; i < expected.planes_.size(); ++i) {
      ASSERT_EQ(actual.planes_[i], expected.planes_[i])
          << what << " plane " << i << " n " << n << " shift " << shift << " step " << step;
    }
    ASSERT_EQ(actual.weights_, expected.weights_) << what << " weights, n " << n;
  }
}

std::vector<RuleOptions> every_option() {
  std::vector<RuleOptions> all;
  for (const bool maximize : {false, true}) {
    all.push_back({.rule = UpdateRule::kAdamW, .maximize = maximize});
    all.push_back({.rule = UpdateRule::kAdam, .maximize = maximize});
    all.push_back({.rule = UpdateRule::kAdam, .beta1 = 0.3, .beta2 = 0.9, .maximize = maximize});
    all.push_back({.rule = UpdateRule::kSgdMomentum, .beta1 = 0, .maximize = maximize});
    all.push_back({.rule = UpdateRule::kSgdMomentum, .dampening = 0.2, .maximize = maximize});
    all.push_back({.rule = UpdateRule::kSgdMomentum, .nesterov = true, .maximize = maximize});
    all.push_back({.rule = UpdateRule::kAdagrad,
                   .maximize = maximize,
                   .lr_decay = 0.1,
                   .initial_accumulator_value = 0.5});
    all.push_back({.rule = UpdateRule::kLion, .beta2 = 0.99, .maximize = maximize});
  }
  return all;
}

TEST_P(EveryTarget, UpdatesAgreeForEveryRuleFormatAndType) {
  for (const RuleOptions& options : every_option()) {
    for (const StateFormat format : kFormats) {
      for (const DataType gradient_type : kTypes) {
        for (const DataType weights_type : kTypes) {
          const std::string what = std::string(update_rule_name(options.rule)) + " " +
                                   base::state_format_name(format) + " " +
                                   std::string(base::data_type_name(gradient_type)) + " " +
                                   std::string(base::data_type_name(weights_type));
          for (const Values values : {tame_values, wild_values}) {
            expect_same(table(), options, format, gradient_type, weights_type, 1031, 1, values,
                        what);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(EveryTarget, UpdatesAgreeForEveryLengthAndAlignment) {
  for (const UpdateRule rule : all_update_rules()) {
    for (const StateFormat format : kFormats) {
      for (size_t n = 0; n <= kLengthMax; ++n) {
        for (size_t shift = 0; shift < 16; ++shift) {
          expect_same(table(), {.rule = rule}, format, DataType::kBf16, DataType::kBf16, n, shift,
                      shift % 2 != 0 ? wild_values : tame_values,
                      std::string(update_rule_name(rule)));
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(EveryTarget, UpdatesAgreeWithGivenSquaresForTheVariance) {
  for (const RuleOptions& options : every_option()) {
    if (!takes_factored_second_moment(options.rule)) continue;
    for (const StateFormat format : kFormats) {
      for (const DataType type : kTypes) {
        for (const size_t n : {0, 1, 15, 255, 256, 257, 512, 1031, 4500}) {
          for (const Values values : {tame_values, wild_values, tiles_of_all_kinds}) {
            expect_same(table(), options, format, type, DataType::kBf16, n, n % 16, values,
                        std::string(update_rule_name(options.rule)), true);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Work that a tile leaves to the next one is done whatever that one holds.
TEST_P(EveryTarget, UpdatesAgreeForTilesOfAllKinds) {
  for (const RuleOptions& options : every_option()) {
    for (const StateFormat format : kFormats) {
      expect_same(table(), options, format, DataType::kBf16, DataType::kBf16, 40 * kTileElements, 1,
                  tiles_of_all_kinds, std::string(update_rule_name(options.rule)));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, EveryTarget, testing::ValuesIn(supported_tables()),
                         [](const auto& table) { return std::string(table.param->isa()); });

}  // namespace
}  // namespace smartinf::kernels
