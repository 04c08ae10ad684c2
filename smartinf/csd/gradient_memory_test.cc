#include "smartinf/csd/gradient_memory.h"

#include <chrono>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace smartinf::csd {
namespace {

// Pieces of a block, as cut_by_stage() makes them, are there in part while all others pass.
TEST(GradientMemory, SubgroupsOfABlockWhereStagesMeetTakeNoBuffers) {
  constexpr uint64_t kLarge = 2 * base::kBlockElements;
  constexpr uint64_t kSmall = base::kBlockElements;
  storage::StoreLayout layout;
  layout.gradient_spill_bytes = 2;
  uint64_t first = 0;
  for (uint32_t i = 0; i < 12; ++i) {
    const uint64_t count = i % 2 == 0 ? kLarge : kSmall;
    layout.subgroups.push_back({base::SubgroupId{i}, first, count});
    first += count;
  }
  auto made = GradientMemory::create(layout, base::DataType::kBf16, 0, true);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  GradientMemory& memory = **made;
  EXPECT_EQ(memory.memory_bytes(), 6 * kSmall * 2);
  std::vector<std::byte> buffer(memory.buffer_bytes());
  memory.set_scratch({std::span(buffer)});
  ASSERT_TRUE(memory.begin_step().ok());

  const std::vector<uint16_t> gradient(kLarge);
  const auto put = [&](uint32_t subgroup, uint64_t from, uint64_t count) {
    return memory.put(subgroup, from, count, base::DataType::kBf16, gradient.data(),
                      std::chrono::milliseconds(1));
  };
  for (uint32_t i = 1; i < 12; i += 2) ASSERT_TRUE(put(i, 0, kSmall / 2).ok());
  for (uint32_t i = 0; i < 12; i += 2) {
    const auto large = put(i, 0, kLarge);
    ASSERT_TRUE(large.ok()) << large.status().to_string();
    ASSERT_TRUE(large->spill.has_value());
    memory.written(*large->spill);
  }
  for (uint32_t i = 1; i < 12; i += 2) {
    const auto rest = put(i, kSmall / 2, kSmall / 2);
    ASSERT_TRUE(rest.ok());
    EXPECT_TRUE(rest->completed && !rest->spill.has_value());
    EXPECT_TRUE(memory.in_memory(i) && memory.complete(i));
  }
}

}  // namespace
}  // namespace smartinf::csd
