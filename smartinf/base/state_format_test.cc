#include "smartinf/base/state_format.h"

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(StateFormat, EncodedBytes) {
  EXPECT_EQ(encoded_bytes(Encoding::kF32, 10), 40u);
  EXPECT_EQ(encoded_bytes(Encoding::kBf16, 10), 20u);
  EXPECT_EQ(encoded_bytes(Encoding::kM24, kBlockElements + 3), 3 * kBlockElements + 9);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, 0), 0u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, 1), 4u + 4u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, 257), 260u + 8u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, kBlockElements), 65536u + 1024u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ8, kBlockElements + 1), 65536u + 1024u + 8u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ4, 0), 0u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ4, 9), 8u + 4u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ4, 257), 132u + 8u);
  EXPECT_EQ(encoded_bytes(Encoding::kQ4, kBlockElements + 1), 32768u + 1024u + 8u);
}

TEST(StateFormat, EveryPlaneHasItsEncoding) {
  EXPECT_EQ(plane_encoding(StateFormat::kQ8, PlaneKind::kMaster), Encoding::kF32);
  const StateFormat pair{MomentFormat::kQ8, MasterFormat::kM24};
  EXPECT_EQ(plane_encoding(pair, PlaneKind::kMaster), Encoding::kM24);
  EXPECT_EQ(plane_encoding(pair, PlaneKind::kMomentum), Encoding::kQ8);
  EXPECT_EQ(plane_encoding(pair, PlaneKind::kResidual), Encoding::kBf16);
  EXPECT_EQ(plane_encoding({MomentFormat::kF32, MasterFormat::kBf16}, PlaneKind::kMaster),
            Encoding::kBf16);
  EXPECT_EQ(plane_encoding(StateFormat::kQ8, PlaneKind::kVariance), Encoding::kQ8);
  EXPECT_EQ(plane_encoding(StateFormat::kBf16, PlaneKind::kMomentum), Encoding::kBf16);
}

TEST(StateFormat, NamesSayBothWhereMastersAreNotF32) {
  EXPECT_EQ(state_format_name(StateFormat::kBf16), "bf16");
  EXPECT_EQ(state_format_name({MomentFormat::kQ8, MasterFormat::kM24}), "m24+q8");
  EXPECT_EQ(enum_from_name<MomentFormat>("q8"), MomentFormat::kQ8);
  EXPECT_FALSE(enum_from_name<MomentFormat>("m24").has_value());
}

}  // namespace
}  // namespace smartinf::base
