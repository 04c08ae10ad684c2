#include "smartinf/plan/row_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/row_pages.h"

namespace smartinf::plan {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

/// How often each device comes in a pattern of that length: its share rounded, at least once.
/// Empty: these do not add up to the length.
std::vector<uint32_t> counts_in(size_t length, std::span<const double> share) {
  std::vector<uint32_t> counts;
  size_t sum = 0;
  for (const double s : share) {
    counts.push_back(
        static_cast<uint32_t>(std::max(1.0, std::round(s * static_cast<double>(length)))));
    sum += counts.back();
  }
  return sum == length ? counts : std::vector<uint32_t>();
}

/// How much longer than planned a step takes: by the device that has the most above its share.
double excess(std::span<const uint32_t> counts, size_t length, std::span<const double> share) {
  double most = 0;
  for (size_t d = 0; d < share.size(); ++d) {
    most = std::max(most, counts[d] / (share[d] * static_cast<double>(length)) - 1);
  }
  return most;
}

}  // namespace

Result<std::vector<uint32_t>> row_pattern(std::span<const double> bandwidths) {
  if (bandwidths.empty()) {
    return Status(ErrorCode::kInvalidArgument, "there is no device for the table's rows",
                  "Name at least one device.");
  }
  double sum = 0;
  for (size_t d = 0; d < bandwidths.size(); ++d) {
    if (!std::isfinite(bandwidths[d]) || bandwidths[d] <= 0) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("device {} has bandwidth {}", d, bandwidths[d]),
                    "Give a positive number, or 0 to have it measured.");
    }
    sum += bandwidths[d];
  }
  std::vector<double> share;
  for (const double bandwidth : bandwidths) share.push_back(bandwidth / sum);
  // The shortest pattern that is good enough, else the best one. Rates are measured, to a few
  // percent.
  constexpr double kExcessMax = 0.02;
  const size_t length_max = std::max<size_t>(64, 2 * share.size());
  std::vector<uint32_t> counts(share.size(), 1);
  double best = excess(counts, share.size(), share);
  for (size_t length = share.size() + 1; length <= length_max && best > kExcessMax; ++length) {
    std::vector<uint32_t> found = counts_in(length, share);
    if (found.empty() || excess(found, length, share) >= best) continue;
    best = excess(found, length, share);
    counts = std::move(found);
  }
  size_t length = 0;
  for (const uint32_t count : counts) length += count;
  std::vector<uint32_t> pattern;
  std::vector<uint32_t> taken(counts.size(), 0);
  while (pattern.size() < length) {
    // The device whose next place is due first.
    size_t next = 0;
    for (size_t d = 1; d < counts.size(); ++d) {
      if (uint64_t{2 * taken[d] + 1} * counts[next] < uint64_t{2 * taken[next] + 1} * counts[d])
        next = d;
    }
    ++taken[next];
    pattern.push_back(static_cast<uint32_t>(next));
  }
  return pattern;
}

Result<RowPlacement> RowPlacement::create(uint64_t rows, uint64_t chunk_rows, uint32_t devices,
                                          std::vector<uint32_t> pattern) {
  SI_CHECK(chunk_rows > 0 && !pattern.empty(), "chunks, and devices for them");
  if (rows == 0) {
    return Status(ErrorCode::kInvalidArgument, "a table of no rows", "Leave it out.");
  }
  RowPlacement placement;
  placement.rows_ = rows;
  placement.chunk_rows_ = chunk_rows;
  placement.slots_.resize(devices);
  for (uint32_t slot = 0; slot < pattern.size(); ++slot) {
    SI_CHECK(pattern[slot] < devices, "the pattern names devices that there are");
    std::vector<uint32_t>& slots = placement.slots_[pattern[slot]];
    placement.rank_.push_back(static_cast<uint32_t>(slots.size()));
    slots.push_back(slot);
  }
  placement.pattern_ = std::move(pattern);
  constexpr uint64_t kRowsMax = std::numeric_limits<uint32_t>::max() - uint64_t{1};
  for (uint32_t d = 0; d < devices; ++d) {
    if (placement.rows_on(d) <= kRowsMax) continue;
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{} of a table's {} rows would be on device {}", placement.rows_on(d), rows, d),
        fmt::format("A device numbers {} at most: add devices.", kRowsMax));
  }
  return placement;
}

RowPlacement::Place RowPlacement::place_of(uint64_t row) const {
  SI_CHECK(row < rows_, "a row of the table");
  const uint64_t chunk = row / chunk_rows_;
  const uint64_t slot = chunk % pattern_.size();
  const uint32_t device = pattern_[slot];
  const uint64_t chunk_there = chunk / pattern_.size() * slots_[device].size() + rank_[slot];
  return {device, static_cast<uint32_t>(chunk_there * chunk_rows_ + row % chunk_rows_)};
}

uint64_t RowPlacement::global_row(uint32_t device, uint32_t row) const {
  const std::vector<uint32_t>& slots = slots_[device];
  SI_CHECK(!slots.empty(), "a row of the device");
  const uint64_t chunk_there = row / chunk_rows_;
  const uint64_t chunk =
      chunk_there / slots.size() * pattern_.size() + slots[chunk_there % slots.size()];
  return chunk * chunk_rows_ + row % chunk_rows_;
}

uint64_t RowPlacement::rows_on(uint32_t device) const {
  const uint64_t cycle = chunk_rows_ * pattern_.size();
  uint64_t rows = rows_ / cycle * slots_[device].size() * chunk_rows_;
  const uint64_t rest = rows_ % cycle;
  for (const uint64_t slot : slots_[device]) {
    const uint64_t first = slot * chunk_rows_;
    if (first < rest) rows += std::min(chunk_rows_, rest - first);
  }
  return rows;
}

Result<RowBatch> row_batch(const RowPlacement& placement, std::span<const int64_t> ids) {
  SI_CHECK(ids.size() < std::numeric_limits<uint32_t>::max(), "places have 32 bits");
  std::vector<std::pair<uint64_t, uint32_t>> sorted(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto row = static_cast<uint64_t>(ids[i]);
    if (row >= placement.rows()) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("row {} (number {} of the batch, from 0) of a table of {} rows",
                                ids[i], i, placement.rows()),
                    fmt::format("Rows are numbered from 0 to {}.", placement.rows() - 1));
    }
    sorted[i] = {row, static_cast<uint32_t>(i)};
  }
  std::ranges::sort(sorted);
  // In the order of the table, which on each device is that of the device.
  std::vector<RowPlacement::Place> distinct;
  RowBatch batch;
  batch.place.resize(ids.size());
  batch.first.assign(placement.devices() + 1, 0);
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i == 0 || sorted[i].first != sorted[i - 1].first) {
      distinct.push_back(placement.place_of(sorted[i].first));
      ++batch.first[distinct.back().device + 1];
    }
    batch.place[sorted[i].second] = static_cast<uint32_t>(distinct.size() - 1);
  }
  for (size_t d = 1; d < batch.first.size(); ++d) batch.first[d] += batch.first[d - 1];
  std::vector<uint32_t> next(batch.first.begin(), batch.first.end() - 1);
  batch.rows.resize(distinct.size());
  for (const RowPlacement::Place& place : distinct) {
    const uint32_t to = next[place.device]++;
    batch.rows[to] = place.row;
    batch.ascending.push_back(to);
  }
  for (uint32_t& place : batch.place) place = batch.ascending[place];
  return batch;
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
