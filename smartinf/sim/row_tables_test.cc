#include "smartinf/sim/row_tables.h"

#include <cmath>
#include <string>

#include <gtest/gtest.h>

namespace smartinf::sim {
namespace {

Machine machine_of(uint32_t devices) {
  Machine machine;
  machine.devices.resize(1);
  DeviceGroup& device = machine.devices.front();
  device.name = "drive";
  device.count = devices;
  device.read_bytes_per_s = device.write_bytes_per_s = 1e9;
  device.page_reads_per_s = 1e5;
  device.page_writes_per_s = 1e5;
  return machine;
}

RowTable table_of() {
  RowTable table;
  table.rows = 1'000'000;
  table.dim = 64;
  table.ids = 10'000;
  table.distinct = true;
  table.memory_bytes = 256 * base::kMiB;
  return table;
}

TEST(SimulatedRows, AGatherTakesItsPages) {
  RowTable table = table_of();
  table.memory_bytes = 40 * base::kMiB;
  table.log_bytes = 64 * base::kMiB;
  const auto times = simulate_rows(table, machine_of(1), {0, 1, 0});
  ASSERT_TRUE(times.ok()) << times.status().to_string();
  // 10,000 rows in nearly as many pages of 200,000, 100,000 a second; some are adjacent.
  EXPECT_EQ(times->rows, 10'000);
  EXPECT_NEAR(times->gather_s, 0.0935, 0.002);
  EXPECT_EQ(times->link_up_bytes, 10'000 * 128.0);
  EXPECT_EQ(times->link_down_bytes, 10'000 * (128.0 + 8));
  EXPECT_EQ(times->bound_by, "drives");
  const auto two = simulate_rows(table, machine_of(2), {0, 1, 0});
  ASSERT_TRUE(two.ok());
  EXPECT_NEAR(two->gather_s, times->gather_s / 2, 0.004);
}

TEST(SimulatedRows, MergesBesideTheModelCostNoTime) {
  RowTable table = table_of();
  table.log_bytes = 32 * base::kMiB;
  const auto alone = simulate_rows(table, machine_of(1), {});
  RowSteps steps;
  steps.beside_s = 10;
  const auto beside = simulate_rows(table, machine_of(1), steps);
  ASSERT_TRUE(alone.ok() && beside.ok());
  EXPECT_GT(alone->merge_s, 0.1);
  EXPECT_NEAR(alone->step_s - beside->step_s, alone->merge_s, 0.2 * alone->merge_s);
  // Each row is written to the log and, nearly always, home in a page of its own.
  EXPECT_NEAR(alone->written_bytes, 10'000 * (4096.0 / 5 + 4096), 10'000 * 500.0);
}

TEST(SimulatedRows, APartOfALargeTableStandsForIt) {
  RowTable table = table_of();
  table.rows = 4'000'000;
  table.ids = 1'000'000;  // four million in all: every other row is simulated
  table.zipf = 1;
  table.distinct = false;
  table.memory_bytes = 4 * base::kGiB;
  const auto large = simulate_rows(table, machine_of(4), {2, 2, 0});
  ASSERT_TRUE(large.ok()) << large.status().to_string();
  // Distinct ranks among n draws of Zipf's law over N: the sum of 1 - (1 - p)^n.
  double expected = 0;
  double harmonic = 0;
  constexpr double kRows = 4'000'000;
  for (double rank = 1; rank <= kRows; ++rank) harmonic += 1 / rank;
  for (double rank = 1; rank <= kRows; ++rank) {
    expected += 1 - std::exp(-1'000'000 / (rank * harmonic));
  }
  EXPECT_NEAR(large->rows / expected, 1, 0.01);
}

TEST(SimulatedRows, WhatCannotBeIsRefused) {
  RowTable table = table_of();
  table.memory_bytes = 16 * base::kMiB;
  const auto little = simulate_rows(table, machine_of(1), {});
  EXPECT_EQ(little.status().code(), base::ErrorCode::kOutOfMemory);
  EXPECT_NE(little.status().to_string().find("Give the table"), std::string::npos);
  table = table_of();
  table.ids = 0;
  EXPECT_EQ(simulate_rows(table, machine_of(1), {}).status().code(),
            base::ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace smartinf::sim
