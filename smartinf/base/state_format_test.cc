#include "smartinf/base/state_format.h"

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(StateFormat, EncodedBytes) {
  EXPECT_EQ(encoded_bytes(Encoding::kF32, 10), 40u);
  EXPECT_EQ(encoded_bytes(Encoding::kBf16, 10), 20u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, 0), 0u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, 1), 4u + 4u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, 257), 260u + 8u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, kBlockElements), 65536u + 1024u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, kBlockElements + 1), 65536u + 1024u + 8u);
}

TEST(StateFormat, MasterIsAlwaysF32) {
  EXPECT_EQ(plane_encoding(StateFormat::kQ8, PlaneKind::kMaster), Encoding::kF32);
  EXPECT_EQ(plane_encoding(StateFormat::kQ8, PlaneKind::kVariance), Encoding::kQ8);
  EXPECT_EQ(plane_encoding(StateFormat::kBf16, PlaneKind::kMomentum), Encoding::kBf16);
}

TEST(StateFormat, NamesReadBack) {
  for (const auto format : {StateFormat::kF32, StateFormat::kBf16, StateFormat::kQ8}) {
    EXPECT_EQ(state_format_from_name(state_format_name(format)), format);
  }
  EXPECT_FALSE(state_format_from_name("int8").has_value());
}

}  // namespace
}  // namespace smartinf::base
