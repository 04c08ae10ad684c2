#include "smartinf/plan/row_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/row_pages.h"

namespace smartinf::plan {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

/// How often each device comes in a pattern of about that length: its share rounded, at least once.
std::vector<uint32_t> counts_in(size_t length, std::span<const double> share) {
  std::vector<uint32_t> counts;
  for (const double s : share) {
    const double count = std::round(s * static_cast<double>(length));
    counts.push_back(s == 0 ? 0 : static_cast<uint32_t>(std::max(1.0, count)));
  }
  return counts;
}

/// How much longer than planned a step takes: by the device that has the most above its share.
double excess(std::span<const uint32_t> counts, std::span<const double> share) {
  const double length = std::reduce(counts.begin(), counts.end());
  double most = 0;
  for (size_t d = 0; d < share.size(); ++d) {
    if (share[d] > 0) most = std::max(most, counts[d] / (share[d] * length) - 1);
  }
  return most;
}

}  // namespace

std::vector<uint8_t> row_pattern(std::span<const double> shares) {
  const double sum = std::reduce(shares.begin(), shares.end());
  SI_CHECK(shares.size() <= 256 && std::isfinite(sum) && sum > 0, "shares of at most 256 devices");
  std::vector<double> share;
  for (const double one : shares) share.push_back(one / sum);
  // The shortest pattern that is good enough, else the best one. Shares follow from measured rates,
  // which are good to a few percent.
  constexpr double kExcessMax = 0.02;
  const size_t length_max = std::max<size_t>(64, 2 * share.size());
  std::vector<uint32_t> counts = counts_in(1, share);
  for (size_t length = 2; length <= length_max && excess(counts, share) > kExcessMax; ++length) {
    std::vector<uint32_t> longer = counts_in(length, share);
    if (excess(longer, share) < excess(counts, share)) counts = std::move(longer);
  }
  const size_t length = std::reduce(counts.begin(), counts.end());
  std::vector<uint8_t> pattern;
  std::vector<uint32_t> taken(counts.size(), 0);
  while (pattern.size() < length) {
    // The device whose next place is due first: its place is in the middle of its part.
    const auto due = [&](size_t d) { return (taken[d] + 0.5) / counts[d]; };
    size_t next = 0;
    for (size_t d = 1; d < counts.size(); ++d) {
      if (due(d) < due(next)) next = d;
    }
    ++taken[next];
    pattern.push_back(static_cast<uint8_t>(next));
  }
  return pattern;
}

Result<RowPlacement> RowPlacement::make(uint64_t rows, std::vector<uint8_t> pattern,
                                        uint64_t chunk_rows) {
  SI_CHECK(chunk_rows > 0 && !pattern.empty(), "chunks, and devices for them");
  if (rows == 0) {
    return Status(ErrorCode::kInvalidArgument, "a table of no rows", "Leave it out.");
  }
  RowPlacement placement;
  placement.rows_ = rows;
  placement.chunk_rows_ = chunk_rows;
  placement.slots_.resize(*std::ranges::max_element(pattern) + size_t{1});
  for (uint32_t slot = 0; slot < pattern.size(); ++slot) {
    std::vector<uint32_t>& slots = placement.slots_[pattern[slot]];
    placement.rank_.push_back(static_cast<uint32_t>(slots.size()));
    slots.push_back(slot);
  }
  placement.pattern_ = std::move(pattern);
  constexpr uint64_t kRowsMax = std::numeric_limits<uint32_t>::max() - uint64_t{1};
  for (uint32_t d = 0; d < placement.devices(); ++d) {
    if (placement.rows_on(d) <= kRowsMax) continue;
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{} of a table's {} rows would be on device {}", placement.rows_on(d), rows, d),
        fmt::format("A device numbers {} at most: add devices.", kRowsMax));
  }
  return placement;
}

uint32_t RowPlacement::device_of(uint64_t row) const {
  SI_CHECK(row < rows_, "a row of the table");
  return pattern_[row / chunk_rows_ % pattern_.size()];
}

uint32_t RowPlacement::local_row(uint64_t row) const {
  const uint64_t chunk = row / chunk_rows_;
  const uint64_t slot = chunk % pattern_.size();
  const uint64_t chunk_there =
      chunk / pattern_.size() * slots_[pattern_[slot]].size() + rank_[slot];
  return static_cast<uint32_t>(chunk_there * chunk_rows_ + row % chunk_rows_);
}

uint64_t RowPlacement::global_row(uint32_t device, uint32_t local) const {
  const std::vector<uint32_t>& slots = slots_[device];
  SI_CHECK(!slots.empty(), "a row of the device");
  const uint64_t chunk_there = local / chunk_rows_;
  const uint64_t chunk =
      chunk_there / slots.size() * pattern_.size() + slots[chunk_there % slots.size()];
  return chunk * chunk_rows_ + local % chunk_rows_;
}

uint64_t RowPlacement::rows_on(uint32_t device) const {
  if (device >= slots_.size()) return 0;
  const uint64_t cycle = chunk_rows_ * pattern_.size();
  uint64_t rows = rows_ / cycle * slots_[device].size() * chunk_rows_;
  const uint64_t rest = rows_ % cycle;
  for (const uint64_t slot : slots_[device]) {
    const uint64_t first = slot * chunk_rows_;
    if (first < rest) rows += std::min(chunk_rows_, rest - first);
  }
  return rows;
}

RowBatch RowBatch::make(const RowPlacement& placement, std::span<const int64_t> ids) {
  SI_CHECK(ids.size() < std::numeric_limits<uint32_t>::max(), "places have 32 bits");
  // (row of the device, number of the id)
  std::vector<std::vector<std::pair<uint32_t, uint32_t>>> sorted(placement.devices());
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto row = static_cast<uint64_t>(ids[i]);
    sorted[placement.device_of(row)].emplace_back(placement.local_row(row),
                                                  static_cast<uint32_t>(i));
  }
  RowBatch batch;
  batch.place.resize(ids.size());
  uint32_t distinct = 0;
  for (auto& of_device : sorted) {
    std::ranges::sort(of_device);
    std::vector<uint32_t>& rows = batch.rows.emplace_back();
    for (const auto& [row, id] : of_device) {
      if (rows.empty() || rows.back() != row) {
        rows.push_back(row);
        ++distinct;
      }
      batch.place[id] = distinct - 1;
    }
  }
  return batch;
}

size_t RowBatch::distinct() const {
  size_t distinct = 0;
  for (const std::vector<uint32_t>& of_device : rows) distinct += of_device.size();
  return distinct;
}

RowTraffic& RowTraffic::operator+=(const RowTraffic& other) {
  pages += other.pages;
  read += other.read;
  log += other.log;
  link_up += other.link_up;
  link_down += other.link_down;
  return *this;
}

uint64_t pages_of(std::span<const uint32_t> rows, uint64_t record_bytes) {
  const uint64_t per_page = base::records_per_page(record_bytes);
  uint64_t pages = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i == 0 || rows[i] / per_page != rows[i - 1] / per_page) ++pages;
  }
  return pages;
}

RowTraffic row_traffic(std::span<const uint32_t> rows, const RowShape& shape) {
  const uint64_t count = rows.size();
  const uint64_t pages = pages_of(rows, shape.record_bytes);
  return {.pages = pages,
          .read = pages * base::page_bytes(shape.record_bytes),
          .log = base::divide_up(count, shape.log_page_records) * shape.log_page_bytes,
          .link_up = count * shape.weights_bytes,
          .link_down = count * (2 * sizeof(uint32_t) + shape.gradient_bytes)};
}

}  // namespace smartinf::plan
