#include "smartinf/base/units.h"

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(Units, FormatsForPeople) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(512 * kMiB), "512 MiB");
  EXPECT_EQ(format_bytes(1610612736), "1.50 GiB");
  EXPECT_EQ(format_rate(2.1e9), "2.10 GB/s");
  EXPECT_EQ(format_count(640), "640");
  EXPECT_EQ(format_count(1.25e9), "1.25 billion");
  EXPECT_EQ(format_seconds(0.038), "38 ms");
  EXPECT_EQ(format_seconds(125), "2 min 05 s");
}

TEST(Units, ParsesSizes) {
  EXPECT_EQ(*parse_bytes("512MiB"), 512 * kMiB);
  EXPECT_EQ(*parse_bytes(" 4 GiB "), 4 * kGiB);
  EXPECT_EQ(*parse_bytes("1.5GB"), 1500000000u);
  EXPECT_EQ(*parse_bytes("65536"), 65536u);
  for (const char* bad : {"", "MiB", "-1", "5 parsecs", "1e30TB", "nan"}) {
    EXPECT_FALSE(parse_bytes(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace smartinf::base
