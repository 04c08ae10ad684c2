#include "smartinf/plan/unit.h"

#include <gtest/gtest.h>

namespace smartinf::plan {
namespace {

TEST(Units, FollowEachOtherFromTheEmbeddingToTheHead) {
  const auto units = make_units({1000, 5000, 16, 1001});
  ASSERT_EQ(units.size(), 18u) << "two layers are more than a sixteenth";
  uint64_t end = 0;
  uint32_t layers = 0;
  for (const Unit& unit : units) {
    EXPECT_EQ(unit.first, end);
    if (unit.layers > 0) {
      EXPECT_EQ(unit.first_layer, layers);
    }
    end = unit.end();
    layers += unit.layers;
  }
  EXPECT_EQ(end, 1000u + 16 * 5000 + 1001);
  EXPECT_EQ(layers, 16u);
  EXPECT_EQ(units.front().count, 1000u);
  EXPECT_EQ(units.back().count, 1001u);
}

TEST(Units, AGroupHasAtMostASixteenthOfTheElements) {
  // 50 layers and 20 layers' worth of embedding and head: four layers are 4 of 70.
  const auto units = make_units({1000, 100, 50, 1000});
  ASSERT_EQ(units.size(), 2u + 13);
  for (size_t u = 1; u + 2 < units.size(); ++u) EXPECT_EQ(units[u].layers, 4u);
  EXPECT_EQ(units[units.size() - 2].layers, 2u) << "what is left";
  EXPECT_EQ(make_units({16000, 1, 3, 1}).size(), 3u) << "all layers are less than that";
  EXPECT_EQ(make_units({1, 16000, 3, 1}).size(), 5u) << "each layer is more";
}

}  // namespace
}  // namespace smartinf::plan
