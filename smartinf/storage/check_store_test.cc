#include "smartinf/storage/check_store.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/storage/memory_store_test.h"

namespace smartinf::storage {
namespace {

using base::Status;
using ::testing::HasSubstr;

struct Checked {
  CheckReport report;
  std::vector<StoreFault> faults;
};

Checked check(MemoryStore& memory, const CheckOptions& options = {}) {
  Checked checked;
  auto report = check_container(memory.container(), options,
                                [&](const StoreFault& fault) { checked.faults.push_back(fault); });
  EXPECT_TRUE(report.ok()) << report.status().to_string();
  if (report.ok()) checked.report = *report;
  return checked;
}

void flip(MemoryStore& memory, uint64_t bit) {
  memory.disk().contents()[bit / 8] ^= std::byte{1} << (bit % 8);
}

class CheckStoreTest : public ::testing::TestWithParam<base::StateFormat> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(memory_.create().ok());
    for (base::StepNumber step = 0; step < 3; ++step) {
      const Status status = memory_.make_step(step);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    memory_.close();
  }
  MemoryStore memory_{GetParam()};
};

TEST_P(CheckStoreTest, GoodStoreHasNoFaults) {
  const Checked checked = check(memory_);
  EXPECT_TRUE(checked.faults.empty());
  EXPECT_EQ(checked.report.checked_step, 2u);
  EXPECT_EQ(checked.report.blocks_checked, 9u);  // two blocks and one, three planes each
  EXPECT_EQ(checked.report.blocks_without_checksum, 0u);
  EXPECT_TRUE(checked.report.state.initialized);
  EXPECT_GT(checked.report.bytes_written_ever, 0u);
  CheckOptions tight;
  tight.memory_bytes = 1;
  EXPECT_TRUE(check(memory_, tight).faults.empty());
}

TEST_P(CheckStoreTest, EveryFlippedBitIsFoundByCheckAndByUse) {
  const Geometry& geometry = memory_.geometry();
  struct Area {
    std::string name;
    FaultKind kind;
    uint64_t offset;
    uint64_t bytes;
    bool costs_state;
  };
  std::vector<Area> areas;
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    areas.push_back(
        {"superblock", FaultKind::kSuperblock, superblock_offset(copy), kSuperblockBytes, false});
  }
  for (uint32_t copy = 0; copy < kLayoutCopies; ++copy) {
    areas.push_back({"layout", FaultKind::kLayout, geometry.layout_offset(copy),
                     geometry.layout_bytes(), false});
    areas.push_back({"table", FaultKind::kTable, geometry.table_offset(2, copy),
                     geometry.table_records_bytes(), false});
    areas.push_back({"client_metadata", FaultKind::kTable,
                     geometry.table_offset(2, copy) + geometry.table_records_bytes(),
                     std::string("step 2").size(), false});
  }
  // Steps 0, 1, 2 went to slots 0, 1, 0.
  for (size_t subgroup = 0; subgroup < geometry.subgroups(); ++subgroup) {
    for (size_t plane = 0; plane < geometry.planes(); ++plane) {
      areas.push_back({"plane", FaultKind::kBlock,
                       geometry.extent_offset(subgroup, 0) + geometry.plane_offset(subgroup, plane),
                       geometry.plane_bytes(subgroup, plane), true});
    }
  }
  std::mt19937_64 random(5);
  for (const Area& area : areas) {
    for (int trial = 0; trial < 8; ++trial) {
      const uint64_t bit = area.offset * 8 + random() % (area.bytes * 8);
      flip(memory_, bit);
      const Checked checked = check(memory_);
      ASSERT_EQ(checked.faults.size(), 1u) << area.name << " bit " << bit;
      EXPECT_EQ(checked.faults[0].kind, area.kind);
      EXPECT_EQ(checked.faults[0].costs_state, area.costs_state);
      EXPECT_EQ(checked.report.state_lost, area.costs_state);
      const base::ErrorPlace& place = checked.faults[0].status.place();
      EXPECT_LE(*place.offset_bytes, bit / 8);
      EXPECT_GT(*place.offset_bytes + *place.length_bytes, bit / 8);
      // The next use: state that is damaged is refused, all else comes from another copy.
      ASSERT_TRUE(memory_.open().ok());
      ASSERT_TRUE(memory_.store().recover_to(memory_.store().state().prepared_step).ok());
      EXPECT_EQ(memory_.store().state().committed_step, 2u);
      bool equal = false;
      EXPECT_EQ(memory_.read_step(2, equal).ok(), !area.costs_state);
      EXPECT_EQ(equal || area.costs_state, true);
      memory_.close();
      flip(memory_, bit);
    }
  }
}

TEST_P(CheckStoreTest, RepairsWhatAnotherCopyKnows) {
  const Geometry& geometry = memory_.geometry();
  for (const uint64_t offset : {superblock_offset(0), superblock_offset(3),
                                geometry.layout_offset(0), geometry.table_offset(2, 1)}) {
    flip(memory_, offset * 8 + 200);
  }
  EXPECT_EQ(check(memory_).faults.size(), 4u);
  EXPECT_EQ(check(memory_).faults.size(), 4u) << "looking must not change anything";
  CheckOptions repair;
  repair.repair = true;
  const Checked repaired = check(memory_, repair);
  EXPECT_EQ(repaired.report.faults, 4u);
  EXPECT_EQ(repaired.report.faults_repaired, 4u);
  EXPECT_FALSE(repaired.report.state_lost);
  EXPECT_TRUE(check(memory_).faults.empty());
  ASSERT_TRUE(memory_.open().ok());
  ASSERT_TRUE(memory_.store().recover_to(2).ok());
  bool equal = false;
  EXPECT_TRUE(memory_.read_step(2, equal).ok());
  EXPECT_TRUE(equal);
  ASSERT_TRUE(memory_.make_step(3).ok());
}

TEST_P(CheckStoreTest, WhatHasNoGoodCopyIsSaidAndLeft) {
  const Geometry& geometry = memory_.geometry();
  for (uint32_t copy = 0; copy < kTableCopies; ++copy) {
    flip(memory_, geometry.table_offset(2, copy) * 8 + 999);
  }
  CheckOptions repair;
  repair.repair = true;
  const Checked checked = check(memory_, repair);
  EXPECT_EQ(checked.faults.size(), 2u);
  EXPECT_EQ(checked.report.faults_repaired, 0u);
  EXPECT_TRUE(checked.report.state_lost);
  EXPECT_THAT(checked.faults[0].status.to_string(), HasSubstr("restore the last checkpoint"));
  ASSERT_TRUE(memory_.open().ok());
  EXPECT_EQ(memory_.store().recover_to(2).code(), base::ErrorCode::kCorrupt);
}

TEST_P(CheckStoreTest, StaleAndMisdirectedBlocksAreFound) {
  const Geometry& geometry = memory_.geometry();
  const std::span<std::byte> disk = memory_.disk().contents();
  const auto area = [&](size_t subgroup, uint32_t slot, size_t plane, uint64_t block) {
    return disk.subspan(geometry.extent_offset(subgroup, slot) +
                            geometry.plane_offset(subgroup, plane) +
                            geometry.block_offset(plane, block),
                        geometry.block_bytes(subgroup, plane, block));
  };
  // The older step's block where the newer one belongs: a lost write.
  const auto stale = area(0, 1, 0, 0);
  std::copy(stale.begin(), stale.end(), area(0, 0, 0, 0).begin());
  EXPECT_EQ(check(memory_).faults.size(), 1u);
  // Two blocks of the same size exchanged.
  const auto one = area(0, 0, 1, 0);
  const auto other = area(0, 0, 2, 0);
  std::swap_ranges(one.begin(), one.end(), other.begin());
  EXPECT_EQ(check(memory_).faults.size(), 3u);
}

TEST_P(CheckStoreTest, PreparedStepIsTheOneChecked) {
  ASSERT_TRUE(memory_.open().ok());
  ASSERT_TRUE(memory_.store().recover_to(2).ok());
  ASSERT_TRUE(memory_.prepare_step(3).ok());
  memory_.close();
  Checked checked = check(memory_);
  EXPECT_TRUE(checked.faults.empty());
  EXPECT_EQ(checked.report.checked_step, 3u);
  EXPECT_EQ(checked.report.state.committed_step, 2u);
  CheckOptions committed;
  committed.step = 2;
  checked = check(memory_, committed);
  EXPECT_TRUE(checked.faults.empty());
  EXPECT_EQ(checked.report.checked_step, 2u);
}

TEST_P(CheckStoreTest, ShortContainer) {
  Container container = memory_.container();
  container.size_bytes -= 4096;
  size_t faults = 0;
  const auto report =
      check_container(std::move(container), {}, [&](const StoreFault&) { ++faults; });
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(faults, 1u);
  EXPECT_TRUE(report->state_lost);
}

INSTANTIATE_TEST_SUITE_P(Formats, CheckStoreTest,
                         ::testing::Values(base::StateFormat::kF32, base::StateFormat::kQ8),
                         [](const auto& kind) {
                           return std::string(base::state_format_name(kind.param));
                         });

}  // namespace
}  // namespace smartinf::storage
