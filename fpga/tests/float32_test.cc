// The card's numbers against the processor's.
#include "fpga/kernels/float32.h"

#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace smartinf::fpga {
namespace {

float native(uint32_t bits) { return std::bit_cast<float>(bits); }
/// The one NaN with which the rules end, whatever NaN a processor makes.
uint32_t canonical(float value) {
  return std::isnan(value) ? 0x7fc00000u : std::bit_cast<uint32_t>(value);
}

void expect_same(uint32_t a, uint32_t b) {
  const Float32 x = Float32::of_bits(a);
  const Float32 y = Float32::of_bits(b);
  const float f = native(a);
  const float g = native(b);
  ASSERT_EQ((x + y).bits(), canonical(f + g)) << std::hex << a << " + " << b;
  ASSERT_EQ((x - y).bits(), canonical(f - g)) << std::hex << a << " - " << b;
  ASSERT_EQ((x * y).bits(), canonical(f * g)) << std::hex << a << " * " << b;
  ASSERT_EQ((x / y).bits(), canonical(f / g)) << std::hex << a << " / " << b;
  ASSERT_EQ(square_root(x).bits(), canonical(std::sqrt(f))) << std::hex << "root of " << a;
  ASSERT_EQ(x < y, f < g) << std::hex << a << " < " << b;
  ASSERT_EQ(x > y, f > g) << std::hex << a << " > " << b;
  ASSERT_EQ(x == y, f == g) << std::hex << a << " == " << b;
  ASSERT_EQ(x != y, f != g) << std::hex << a << " != " << b;
}

TEST(Float32, EdgesInEveryPair) {
  std::vector<uint32_t> edges;
  for (const uint32_t magnitude :
       {0x00000000u, 0x00000001u, 0x00000002u, 0x00000003u, 0x00400000u, 0x007ffffeu, 0x007fffffu,
        0x00800000u, 0x00800001u, 0x00ffffffu, 0x01000000u, 0x0b800000u, 0x1f800000u, 0x1fffffffu,
        0x20000000u, 0x33000000u, 0x33800000u, 0x34000000u, 0x3effffffu, 0x3f000000u, 0x3f7fffffu,
        0x3f800000u, 0x3f800001u, 0x3fffffffu, 0x40000000u, 0x40400000u, 0x4b000000u, 0x4b7fffffu,
        0x4b800000u, 0x5f000000u, 0x7e800000u, 0x7f000000u, 0x7f7ffffeu, 0x7f7fffffu, 0x7f800000u,
        0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
    edges.push_back(magnitude);
    edges.push_back(magnitude | 0x80000000u);
  }
  for (const uint32_t a : edges) {
    for (const uint32_t b : edges) expect_same(a, b);
  }
}

TEST(Float32, RandomBitsAndCloseExponents) {
  std::mt19937 random(7);
  for (int i = 0; i < 400000; ++i) {
    const auto a = static_cast<uint32_t>(random());
    expect_same(a, static_cast<uint32_t>(random()));
    // Sums that cancel, quotients near 1, products near the least normal number.
    const auto exponent = static_cast<uint32_t>(random() % 4) << 23;
    expect_same(a, (a & 0x7f800000u) + exponent + (static_cast<uint32_t>(random()) & 0x807fffffu));
    expect_same(a & 0x80ffffffu, static_cast<uint32_t>(random()) & 0xc0ffffffu);
    expect_same(
        a, (0x7f000000u - (a & 0x7f800000u)) ^ (static_cast<uint32_t>(random()) & 0x80ffffffu));
  }
}

}  // namespace
}  // namespace smartinf::fpga
