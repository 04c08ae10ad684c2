#include "smartinf/base/row_map.h"

#include <map>
#include <random>

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(RowMap, IsAMap) {
  std::mt19937 engine(1);
  const auto random = [&] { return static_cast<uint32_t>(engine()); };
  RowMap map;
  std::map<uint32_t, uint32_t> expected;
  for (int i = 0; i < 200'000; ++i) {
    // Rows that are near each other, and some that are far.
    const uint32_t row = random() % 8 == 0 ? random() : random() % 5000;
    if (random() % 3 == 0) {
      EXPECT_EQ(map.erase(row), expected.erase(row) == 1);
    } else {
      map.set(row, expected[row] = random() % 1000);
    }
  }
  EXPECT_EQ(map.size(), expected.size());
  for (const auto& [row, value] : expected) EXPECT_EQ(map.find(row), value);
  uint64_t seen = 0;
  map.for_each([&](uint32_t row, uint32_t value) {
    ++seen;
    EXPECT_EQ(expected.at(row), value);
  });
  EXPECT_EQ(seen, expected.size());
  map.clear();
  EXPECT_EQ(map.size(), 0u);
  EXPECT_EQ(map.find(expected.begin()->first), RowMap::kNone);
}

TEST(RowMap, GrowsOnlyAboveItsRoom) {
  RowMap map(1000);
  for (uint32_t row = 0; row < 1000; ++row) map.set(row * 4096, row);
  for (uint32_t row = 0; row < 1000; ++row) EXPECT_EQ(map.find(row * 4096), row);
  EXPECT_LE(RowMap::memory_bytes(1000), 2048u * 8);
}

}  // namespace
}  // namespace smartinf::base
