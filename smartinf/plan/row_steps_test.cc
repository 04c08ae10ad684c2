#include "smartinf/plan/row_steps.h"

#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/row_pages.h"
#include "smartinf/base/units.h"

namespace smartinf::plan {
namespace {

constexpr uint64_t kDim = 64;
constexpr uint64_t kRecord = 772;  // five in a page, five in a page of the log

std::vector<uint32_t> rows_from(uint32_t first, uint32_t count, uint32_t stride) {
  std::vector<uint32_t> rows(count);
  for (uint32_t i = 0; i < count; ++i) rows[i] = first + i * stride;
  return rows;
}

RowDeviceShape shape_of(uint64_t rows, uint64_t cache_rows, uint64_t log_pages) {
  RowDeviceShape shape =
      RowDeviceShape::make(rows, kDim, kRecord, 2, base::kGiB, log_pages * base::kRowPageUnit);
  shape.cache_rows = cache_rows;
  return shape;
}

TEST(RowDevice, ReadsAPageOnceAndWhatIsCachedNever) {
  RowDevice device(shape_of(1000, 1000, 500));
  const auto rows = rows_from(0, 20, 1);  // four adjacent pages: one transfer
  const RowWork first = device.gather(rows);
  EXPECT_EQ(first.read_bytes, 4 * 4096u);
  EXPECT_EQ(first.reads, 1u);
  EXPECT_EQ(first.cached, 0u);
  EXPECT_EQ(device.gather(rows).cached, 20u);
  const RowWork apart = device.gather(rows_from(100, 10, 50));
  EXPECT_EQ(apart.reads, 10u);
}

TEST(RowDevice, WithoutACacheRowsAreReadAgainAndThenFromTheLog) {
  RowDevice device(shape_of(1000, 0, 500));
  const auto rows = rows_from(0, 10, 100);
  EXPECT_EQ(device.gather(rows).reads, 10u);
  const RowWork update = device.update(rows);
  EXPECT_EQ(update.reads, 10u);
  EXPECT_EQ(update.log_bytes, 2 * 4096u);
  device.commit();
  // Ten rows are in two adjacent pages of the log now.
  const RowWork again = device.gather(rows);
  EXPECT_EQ(again.read_bytes, 2 * 4096u);
  EXPECT_EQ(again.reads, 1u);
}

TEST(RowDevice, WritesEveryRowHomeThatTheLogHasNoRoomFor) {
  RowDevice device(shape_of(400'000, 0, 800));
  RowWork all;
  uint64_t updated = 0;
  for (uint32_t step = 0; step < 40; ++step) {
    const auto rows = rows_from(step * 47, 200, 2000);  // no two of a merge in adjacent pages
    (void)device.gather(rows);
    all += device.update(rows);
    device.commit();
    all += device.merge_some();
    updated += rows.size();
  }
  // All but what the log has room for is at home, a page each.
  EXPECT_GT(all.merged_rows, updated - 800 * 5);
  EXPECT_LT(all.merged_rows, updated);
  EXPECT_EQ(all.merge_writes, all.merged_rows);
  EXPECT_GT(all.merge_written_bytes, all.merged_rows * 4096);
  EXPECT_LT(all.merge_written_bytes, all.merged_rows * 4096 * 21 / 20);
}

TEST(RowDevice, OnlyTheNewestOfARowsRecordsGoHome) {
  RowDevice device(shape_of(100'000, 0, 400));
  const auto rows = rows_from(0, 200, 400);
  RowWork all;
  for (uint32_t step = 0; step < 40; ++step) {
    (void)device.gather(rows);
    all += device.update(rows);
    device.commit();
    all += device.merge_some();
  }
  // 200 rows in 40 steps, in batches that reach into the newest step's at times.
  EXPECT_GT(all.merges, 0u);
  EXPECT_LT(all.merged_rows, 40 * 200 / 4);
}

}  // namespace
}  // namespace smartinf::plan
