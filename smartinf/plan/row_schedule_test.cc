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

std::vector<uint32_t> pattern_of(const std::vector<double>& bandwidths) {
  return row_pattern(bandwidths).value();
}

TEST(RowPattern, DevicesComeAsOftenAsTheirBandwidthAsks) {
  EXPECT_THAT(pattern_of({7}), ElementsAre(0));
  EXPECT_THAT(pattern_of({3, 3.01, 2.99}), ElementsAre(0, 1, 2));
  EXPECT_THAT(pattern_of({1, 2}), ElementsAre(1, 0, 1));
  for (const std::vector<double>& rates :
       {std::vector<double>{7, 3.1}, {5, 1, 1.7}, {1, 2, 3, 4, 5, 6}, {3.3, 0.9}}) {
    const std::vector<uint32_t> pattern = pattern_of(rates);
    double sum = 0;
    for (const double rate : rates) sum += rate;
    for (uint32_t d = 0; d < rates.size(); ++d) {
      const auto share =
          static_cast<double>(std::ranges::count(pattern, d)) / static_cast<double>(pattern.size());
      EXPECT_LE(share, rates[d] / sum * 1.02 + 1e-9) << d << " of " << rates.size();
    }
    EXPECT_LE(pattern.size(), 64u);
  }
  // One that is very slow has a part as well.
  EXPECT_EQ(std::ranges::count(pattern_of({1000, 1}), 1u), 1);
  EXPECT_EQ(pattern_of(std::vector<double>(100, 1)).size(), 100u);
  EXPECT_THAT(row_pattern({}).status().what(), HasSubstr("no device"));
  for (const double bad : {0.0, -1.0, 1.0 / 0.0}) {
    const std::vector<double> rates = {1, bad};
    EXPECT_THAT(row_pattern(rates).status().what(), HasSubstr("device 1 has bandwidth"));
  }
}

TEST(RowPlacement, EveryRowHasOnePlace) {
  for (const uint64_t chunk : {1, 5, 21}) {
    for (const uint64_t rows : {1, 4, 5, 6, 104, 105, 106, 1000}) {
      const auto placement = RowPlacement::create(rows, chunk, 4, {1, 0, 1, 3}).value();
      std::map<uint32_t, uint32_t> next;
      for (uint64_t row = 0; row < rows; ++row) {
        const auto place = placement.place_of(row);
        // Ascending in the table is ascending on the device, without gaps.
        ASSERT_EQ(place.row, next[place.device]++) << row;
        ASSERT_EQ(placement.global_row(place.device, place.row), row);
        ASSERT_EQ(place.device, placement.pattern()[row / chunk % 4]);
      }
      for (uint32_t d = 0; d < 4; ++d) ASSERT_EQ(placement.rows_on(d), next[d]) << rows;
    }
  }
}

TEST(RowPlacement, RowsOfADeviceAreNumberedByThirtyTwoBits) {
  EXPECT_TRUE(RowPlacement::create(8'000'000'000, 5, 2, {0, 1}).ok());
  const auto many = RowPlacement::create(8'000'000'000, 5, 2, {0, 1, 0});
  EXPECT_EQ(many.status().code(), base::ErrorCode::kInvalidArgument);
  EXPECT_THAT(many.status().what(), HasSubstr("would be on device 0"));
  EXPECT_THAT(RowPlacement::create(0, 5, 1, {0}).status().what(), HasSubstr("no rows"));
}

TEST(RowBatch, ListsDistinctRowsByDeviceAscending) {
  const auto placement = RowPlacement::create(100, 5, 3, {2, 0}).value();
  // Chunks of even number are on device 2, of odd number on device 0.
  const std::vector<int64_t> ids = {99, 3, 12, 99, 0, 7, 3};
  const RowBatch batch = row_batch(placement, ids).value();
  EXPECT_THAT(batch.rows, ElementsAre(2, 49, 0, 3, 7));
  EXPECT_THAT(batch.first, ElementsAre(0, 2, 2, 5));
  EXPECT_THAT(batch.place, ElementsAre(1, 3, 4, 1, 2, 0, 3));
  EXPECT_THAT(batch.ascending, ElementsAre(2, 3, 0, 4, 1));
  EXPECT_THAT(batch.rows_of(0), ElementsAre(2, 49));
  EXPECT_TRUE(batch.rows_of(1).empty());

  std::mt19937 random(1);
  const auto large = RowPlacement::create(1'000'003, 7, 5, {4, 0, 2, 1, 4, 3}).value();
  std::vector<int64_t> many(20'000);
  for (int64_t& id : many)
    id = static_cast<int64_t>(random() % 1'000'003 % (1 + random() % 1'000'003));
  const RowBatch found = row_batch(large, many).value();
  EXPECT_EQ(found.rows.size(), std::set(many.begin(), many.end()).size());
  std::vector<uint64_t> in_order;
  const auto global = [&](uint32_t place) {
    const auto end = std::ranges::upper_bound(found.first, place);
    const auto device = static_cast<uint32_t>(end - found.first.begin() - 1);
    return large.global_row(device, found.rows[place]);
  };
  for (size_t i = 0; i < many.size(); ++i) {
    ASSERT_EQ(global(found.place[i]), static_cast<uint64_t>(many[i]));
  }
  for (const uint32_t place : found.ascending) in_order.push_back(global(place));
  EXPECT_TRUE(std::ranges::is_sorted(in_order, std::less_equal<>()) &&
              std::ranges::adjacent_find(in_order) == in_order.end());
  for (uint32_t d = 0; d < 5; ++d) EXPECT_TRUE(std::ranges::is_sorted(found.rows_of(d)));
  EXPECT_TRUE(row_batch(large, {}).value().rows.empty());
}

TEST(RowBatch, RefusesARowThatTheTableDoesNotHave) {
  const auto placement = RowPlacement::create(100, 5, 1, {0}).value();
  for (const int64_t bad : {int64_t{100}, int64_t{-1}}) {
    const std::vector<int64_t> ids = {3, 99, bad, 5};
    const auto batch = row_batch(placement, ids);
    EXPECT_EQ(batch.status().code(), base::ErrorCode::kInvalidArgument);
    EXPECT_THAT(batch.status().what(), HasSubstr("row " + std::to_string(bad) + " (number 2"));
    EXPECT_THAT(batch.status().advice(), HasSubstr("from 0 to 99"));
  }
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
