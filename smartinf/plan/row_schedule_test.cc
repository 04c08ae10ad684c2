#include "smartinf/plan/row_schedule.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/row_pages.h"

namespace smartinf::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Shares = std::vector<double>;

TEST(RowPattern, DevicesComeAsOftenAsTheirShareAsks) {
  EXPECT_THAT(row_pattern(Shares{7}), ElementsAre(0));
  EXPECT_THAT(row_pattern(Shares{3, 3.01, 2.99}), ElementsAre(0, 1, 2));
  EXPECT_THAT(row_pattern(Shares{1, 0, 2}), ElementsAre(2, 0, 2));
  for (const Shares& shares :
       {Shares{7, 3.1}, {5, 1, 1.7}, {1, 2, 3, 4, 5, 6}, {3.3, 0.9}, {1, 1, 1, 1.3}}) {
    const std::vector<uint8_t> pattern = row_pattern(shares);
    double sum = 0;
    for (const double share : shares) sum += share;
    for (uint8_t d = 0; d < shares.size(); ++d) {
      const auto share =
          static_cast<double>(std::ranges::count(pattern, d)) / static_cast<double>(pattern.size());
      EXPECT_LE(share, shares[d] / sum * 1.02 + 1e-9) << int{d} << " of " << shares.size();
    }
    EXPECT_LE(pattern.size(), 64u);
  }
  // One that is very slow has a part as well.
  EXPECT_EQ(std::ranges::count(row_pattern(Shares{1000, 1}), 1), 1);
  EXPECT_EQ(row_pattern(Shares(100, 1)).size(), 100u);
}

TEST(RowPlacement, EveryRowHasOnePlace) {
  const std::vector<uint8_t> pattern = {1, 0, 1, 3};
  for (const uint64_t chunk : {1, 5, 21}) {
    for (const uint64_t rows : {1, 4, 5, 6, 104, 105, 106, 1000}) {
      const auto placement = RowPlacement::make(rows, pattern, chunk).value();
      std::map<uint32_t, uint32_t> next;
      for (uint64_t row = 0; row < rows; ++row) {
        const uint32_t device = placement.device_of(row);
        // Ascending in the table is ascending on the device, without gaps.
        ASSERT_EQ(placement.local_row(row), next[device]++) << row;
        ASSERT_EQ(placement.global_row(device, placement.local_row(row)), row);
        ASSERT_EQ(device, pattern[row / chunk % 4]);
      }
      for (uint32_t d = 0; d < 5; ++d) ASSERT_EQ(placement.rows_on(d), next[d]) << rows;
    }
  }
}

TEST(RowPlacement, RowsOfADeviceAreNumberedByThirtyTwoBits) {
  EXPECT_TRUE(RowPlacement::make(8'000'000'000, {0, 1}, 5).ok());
  const auto many = RowPlacement::make(8'000'000'000, {0, 1, 0}, 5);
  EXPECT_EQ(many.status().code(), base::ErrorCode::kInvalidArgument);
  EXPECT_THAT(many.status().what(), HasSubstr("would be on device 0"));
  EXPECT_THAT(RowPlacement::make(0, {0}, 5).status().what(), HasSubstr("no rows"));
}

TEST(RowBatch, ListsDistinctRowsByDeviceAscending) {
  const auto placement = RowPlacement::make(100, {2, 0}, 5).value();
  // Chunks of even number are on device 2, of odd number on device 0.
  const std::vector<int64_t> ids = {99, 3, 12, 99, 0, 7, 3};
  const RowBatch batch = RowBatch::make(placement, ids);
  EXPECT_THAT(batch.rows, ElementsAre(ElementsAre(2, 49), ElementsAre(), ElementsAre(0, 3, 7)));
  EXPECT_THAT(batch.place, ElementsAre(1, 3, 4, 1, 2, 0, 3));
  EXPECT_EQ(batch.distinct(), 5u);

  std::mt19937 random(1);
  const auto large = RowPlacement::make(1'000'003, {4, 0, 2, 1, 4, 3}, 7).value();
  std::vector<int64_t> many(20'000);
  for (int64_t& id : many) {
    id = static_cast<int64_t>(random() % 1'000'003 % (1 + random() % 1'000'003));
  }
  const RowBatch found = RowBatch::make(large, many);
  EXPECT_EQ(found.distinct(), std::set(many.begin(), many.end()).size());
  std::vector<uint64_t> rows;
  for (uint32_t d = 0; d < found.rows.size(); ++d) {
    EXPECT_TRUE(std::ranges::is_sorted(found.rows[d]));
    for (const uint32_t row : found.rows[d]) rows.push_back(large.global_row(d, row));
  }
  for (size_t i = 0; i < many.size(); ++i) {
    ASSERT_EQ(rows[found.place[i]], static_cast<uint64_t>(many[i]));
  }
  EXPECT_EQ(RowBatch::make(large, {}).distinct(), 0u);
}

TEST(RowTraffic, CountsEveryPageOnce) {
  // 5 records of 772 bytes in a page.
  const std::vector<uint32_t> rows = {0, 4, 5, 9, 10, 1000};
  EXPECT_EQ(pages_of(rows, 772), 4u);
  EXPECT_EQ(pages_of(rows, 5000), 6u);
  EXPECT_EQ(pages_of({}, 772), 0u);
  const RowShape shape{.record_bytes = 772,
                       .weights_bytes = 128,
                       .gradient_bytes = 128,
                       .log_page_bytes = 4096,
                       .log_page_records = 5};
  EXPECT_EQ(row_traffic(rows, shape), (RowTraffic{.pages = 4,
                                                  .read = 4 * 4096,
                                                  .log = 2 * 4096,
                                                  .link_up = 6 * 128,
                                                  .link_down = 6 * (8 + 128)}));
}

}  // namespace
}  // namespace smartinf::plan
