#include "smartinf/base/float_formats.h"

#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);  // tie, even below
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);  // tie, even above
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808001u)).bits, 0x3f81);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);  // rounds to infinity
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(Bf16, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    const Bf16 value{static_cast<uint16_t>(bits)};
    if (std::isnan(to_f32(value))) continue;
    ASSERT_EQ(to_bf16(to_f32(value)).bits, bits);
  }
}

// The compiler's own _Float16 conversions are the independent truth.
TEST(F16, AgreesWithTheCompilersConversion) {
  for (uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    const F16 value{static_cast<uint16_t>(bits)};
    _Float16 reference;
    const auto half = static_cast<uint16_t>(bits);
    std::memcpy(&reference, &half, 2);
    const float expected = static_cast<float>(reference);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(to_f32(value)));
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(to_f32(value)), std::bit_cast<uint32_t>(expected)) << bits;
    }
  }
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 4099) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(value)) continue;
    const auto reference = static_cast<_Float16>(value);
    uint16_t expected;
    std::memcpy(&expected, &reference, 2);
    ASSERT_EQ(to_f16(value).bits, expected) << bits;
  }
}

}  // namespace
}  // namespace smartinf::base
