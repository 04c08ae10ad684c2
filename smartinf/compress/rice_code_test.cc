#include "smartinf/compress/rice_code.h"

#include <optional>
#include <random>
#include <utility>

#include <gtest/gtest.h>

namespace smartinf::compress {
namespace {

using Values = std::vector<std::pair<uint64_t, uint64_t>>;  // index and sign

/// Reads by the grammar of docs/format.md, a bit at a time. Nothing where the bytes break it.
std::optional<Values> read_slowly(std::span<const std::byte> bytes,
                                  const RiceParameters& parameters) {
  uint64_t at = 0;
  const auto bit = [&]() -> int {
    if (at >= bytes.size() * 8) return -1;
    const auto byte = std::to_integer<unsigned>(bytes[at / 8]);
    return static_cast<int>(byte >> at++ % 8 & 1);
  };
  const auto pad = [&] {
    while (at % 8 != 0) {
      if (bit() != 0) return false;
    }
    return true;
  };
  Values values(parameters.values);
  std::vector<uint64_t> lows(parameters.values);
  for (uint64_t i = 0; i < parameters.values; ++i) {
    for (unsigned b = 0; b < parameters.low_bits + parameters.sign_bits; ++b) {
      const int next = bit();
      if (next < 0) return std::nullopt;
      if (b < parameters.low_bits) {
        lows[i] |= static_cast<uint64_t>(next) << b;
      } else {
        values[i].second = static_cast<uint64_t>(next);
      }
    }
  }
  if (!pad()) return std::nullopt;
  uint64_t expected = 0;
  for (uint64_t i = 0; i < parameters.values; ++i) {
    uint64_t zeros = 0;
    int next = bit();
    for (; next == 0; next = bit()) ++zeros;
    if (next < 0) return std::nullopt;
    values[i].first = expected + (zeros << parameters.low_bits) + lows[i];
    if (values[i].first >= parameters.elements) return std::nullopt;
    expected = values[i].first + 1;
  }
  if (!pad() || at != bytes.size() * 8) return std::nullopt;
  return values;
}

void expect_same(std::span<const std::byte> bytes, const RiceParameters& parameters) {
  const auto expected = read_slowly(bytes, parameters);
  const RiceReader reader(bytes, parameters);
  ASSERT_EQ(reader.well_formed(), expected.has_value());
  if (!expected) return;
  Values found;
  reader.for_each([&](uint64_t index, uint64_t sign) { found.emplace_back(index, sign); });
  ASSERT_EQ(found, *expected);
}

TEST(GapCode, ReadsBackWhatItWrites) {
  std::mt19937 random(1);
  for (const uint64_t elements : {1u, 2u, 17u, 100u, 5000u, 65536u}) {
    for (const double share : {0.0, 0.0002, 0.01, 0.08, 0.3, 0.6, 0.97}) {
      for (const unsigned sign_bits : {0u, 1u}) {
        std::vector<uint32_t> ends = {0};
        Values expected;
        std::bernoulli_distribution taken(share);
        for (uint32_t i = 0; i < elements; ++i) {
          if (!taken(random)) continue;
          const auto sign = static_cast<uint32_t>(sign_bits > 0 ? random() & 1 : 0);
          ends.push_back((i + 1) | sign << 31);
          expected.emplace_back(i, sign);
        }
        const RiceParameters parameters{.low_bits = gap_low_bits(elements, expected.size()),
                                        .sign_bits = sign_bits,
                                        .values = expected.size(),
                                        .elements = elements};
        RiceWriter writer;
        std::vector<std::byte> bytes(3, std::byte{0x77});  // behind what is there
        writer.append(ends, parameters, bytes);
        const auto written = std::span(bytes).subspan(3);
        EXPECT_LE(written.size(), rice_bytes_max(elements, expected.size(), sign_bits));
        ASSERT_EQ(read_slowly(written, parameters), expected) << elements << " " << share;
        expect_same(written, parameters);
      }
    }
  }
}

/// All bytes of a length, for small blocks.
TEST(GapCode, TakesWhatIsWellFormedAndNothingElse) {
  for (const uint64_t values : {0u, 1u, 2u, 3u, 5u}) {
    for (const unsigned low_bits : {0u, 1u, 2u, 5u}) {
      for (const unsigned sign_bits : {0u, 1u}) {
        const RiceParameters parameters{low_bits, sign_bits, values, 9};
        for (size_t length = 0; length <= 2; ++length) {
          for (uint32_t word = 0; word < 1u << 8 * length; ++word) {
            std::vector<std::byte> bytes(length);
            for (size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>(word >> 8 * i);
            ASSERT_NO_FATAL_FAILURE(expect_same(bytes, parameters))
                << values << " " << low_bits << " " << sign_bits << " " << length << " " << word;
          }
        }
      }
    }
  }
}

TEST(GapCode, TakesNoDamageThatTheGrammarDoesNot) {
  std::mt19937 random(2);
  std::vector<uint32_t> ends = {0};
  for (uint32_t i = 0; i < 900; ++i) {
    if (random() % 11 != 0) continue;
    const auto sign = static_cast<uint32_t>(random() & 1);
    ends.push_back((i + 1) | sign << 31);
  }
  const RiceParameters parameters{
      .low_bits = 3, .sign_bits = 1, .values = ends.size() - 1, .elements = 900};
  RiceWriter writer;
  std::vector<std::byte> bytes;
  writer.append(ends, parameters, bytes);
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::byte> damaged = bytes;
    for (uint32_t flips = 1 + static_cast<uint32_t>(random() % 3); flips > 0; --flips) {
      damaged[random() % damaged.size()] ^= static_cast<std::byte>(1u << random() % 8);
    }
    if (random() % 8 == 0) damaged.resize(random() % (damaged.size() + 9));
    ASSERT_NO_FATAL_FAILURE(expect_same(damaged, parameters));
  }
}

/// Blocks with one long gap, and such with gaps of one length, keep the bound.
TEST(GapCode, NoneIsLongerThanItsBound) {
  for (uint64_t elements = 1; elements <= 70; ++elements) {
    for (uint64_t most = 1; most <= elements; ++most) {
      for (uint64_t values = 1; values <= most && values < elements; ++values) {
        for (const bool one_gap : {true, false}) {
          std::vector<uint32_t> ends = {0};
          for (uint64_t i = 0; i < values; ++i) {
            ends.push_back(static_cast<uint32_t>(one_gap ? elements - values + i + 1
                                                         : (i + 1) * (elements / values)));
          }
          for (const unsigned sign_bits : {0u, 1u}) {
            const RiceParameters parameters{gap_low_bits(elements, values), sign_bits, values,
                                            elements};
            RiceWriter writer;
            std::vector<std::byte> bytes;
            writer.append(ends, parameters, bytes);
            ASSERT_LE(bytes.size(), rice_bytes_max(elements, most, sign_bits))
                << elements << " " << most << " " << values;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace smartinf::compress
