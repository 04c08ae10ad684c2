#include "smartinf/plan/row_steps.h"

#include <algorithm>

#include "smartinf/base/row_pages.h"
#include "smartinf/base/units.h"

namespace smartinf::plan {

namespace {

constexpr uint64_t kLogBytesMin = 8 * base::kMiB;
constexpr uint64_t kBufferBytes = 17 * base::kMiB + 16 * base::kKiB;
constexpr uint64_t kTransferBytes = 32 * base::kKiB;  // adjacent pages, at once
constexpr uint64_t kHeaderBytes = 8192;               // both copies, of a merge
constexpr uint64_t kRowsAtOnce = 4096;                // of an update
constexpr uint64_t kUndoBytes = 8;

/// Transfers of ascending pages, as far as adjacent ones go together.
uint64_t transfers_of(std::span<const uint32_t> pages, uint64_t page_bytes) {
  const uint64_t most = std::max<uint64_t>(1, kTransferBytes / page_bytes);
  uint64_t transfers = 0;
  uint64_t first = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (i > 0 && pages[i] == pages[i - 1] + 1 && pages[i] - first < most) continue;
    first = pages[i];
    ++transfers;
  }
  return transfers;
}

void make_distinct(std::vector<uint32_t>& pages) {
  std::ranges::sort(pages);
  const auto rest = std::ranges::unique(pages);
  pages.erase(rest.begin(), rest.end());
}

}  // namespace

uint64_t row_log_bytes(uint64_t home_bytes, uint64_t record_bytes, uint64_t memory_bytes) {
  const uint64_t indexed = memory_bytes / 2 / (2 * sizeof(uint64_t)) * record_bytes;
  return std::max(kLogBytesMin, std::min(home_bytes / 4, indexed));
}

RowDeviceShape RowDeviceShape::make(uint64_t rows, uint64_t dim, uint64_t record_bytes,
                                    uint64_t value_bytes, uint64_t memory_bytes,
                                    uint64_t log_bytes) {
  RowDeviceShape shape;
  shape.rows = rows;
  shape.row.record_bytes = record_bytes;
  shape.row.weights_bytes = shape.row.gradient_bytes = dim * value_bytes;
  shape.row.log_page_bytes = base::row_log_page_bytes(record_bytes);
  shape.row.log_page_records =
      base::records_per_row_log_page(shape.row.log_page_bytes, record_bytes);
  if (log_bytes == 0) log_bytes = row_log_bytes(rows * record_bytes, record_bytes, memory_bytes);
  shape.log_pages = log_bytes / shape.row.log_page_bytes;
  const uint64_t records = std::min(rows, shape.log_pages * shape.row.log_page_records);
  const uint64_t index = base::RowMap::memory_bytes(records);
  shape.fixed_bytes = kBufferBytes + shape.log_pages * sizeof(uint32_t) +
                      base::round_up(base::row_pages(rows, record_bytes), base::kRowPageUnit) +
                      index + index / 2 + records * kUndoBytes;
  if (memory_bytes > shape.fixed_bytes) {
    shape.cache_rows = std::min(
        rows, (memory_bytes - shape.fixed_bytes) / (record_bytes + RowQueues::kBytesOfRow));
  }
  return shape;
}

uint64_t RowDeviceShape::file_bytes() const {
  return base::row_pages(rows, row.record_bytes) * (base::page_bytes(row.record_bytes) + 2) +
         log_pages * row.log_page_bytes;
}

RowWork& RowWork::operator+=(const RowWork& other) {
  rows += other.rows;
  cached += other.cached;
  reads += other.reads;
  read_bytes += other.read_bytes;
  log_bytes += other.log_bytes;
  merges += other.merges;
  merged_rows += other.merged_rows;
  merge_reads += other.merge_reads;
  merge_read_bytes += other.merge_read_bytes;
  merge_writes += other.merge_writes;
  merge_written_bytes += other.merge_written_bytes;
  return *this;
}

RowDevice::RowDevice(const RowDeviceShape& shape) : shape_(shape), cache_(shape.cache_rows) {}

void RowDevice::read(std::span<const uint32_t> rows, RowUse use, RowWork& work) {
  const uint64_t page_bytes = base::page_bytes(shape_.row.record_bytes);
  const uint64_t per_page = base::records_per_page(shape_.row.record_bytes);
  std::vector<uint32_t> missing;
  for (const uint32_t row : rows) {
    if (cache_.find(row, use) == RowQueues::kNone) missing.push_back(row);
  }
  work.rows += rows.size();
  work.cached += rows.size() - missing.size();
  pages_.clear();
  std::vector<uint32_t> homes;
  for (const uint32_t row : missing) {
    const uint32_t page = index_.find(row);
    if (page == base::RowMap::kNone) {
      homes.push_back(static_cast<uint32_t>(row / per_page));
    } else {
      pages_.push_back(page);
    }
    (void)cache_.insert(row, use);
  }
  make_distinct(pages_);
  make_distinct(homes);
  work.reads += transfers_of(homes, page_bytes) + transfers_of(pages_, shape_.row.log_page_bytes);
  work.read_bytes += homes.size() * page_bytes + pages_.size() * shape_.row.log_page_bytes;
}

RowWork RowDevice::gather(std::span<const uint32_t> rows) {
  RowWork work;
  read(rows, RowUse::kOfStep, work);
  return work;
}

RowWork RowDevice::update(std::span<const uint32_t> rows) {
  RowWork work;
  const uint64_t per_log_page = shape_.row.log_page_records;
  const uint64_t step_pages = base::divide_up(rows.size(), per_log_page) + 1;
  const uint64_t merge_pages = base::divide_up(
      base::kRowMergeRecordsMax * base::kRowMergeEntryBytesMin, shape_.row.log_page_bytes);
  while (used() > 0 && used() + step_pages + merge_pages > shape_.log_pages) merge(work);
  for (size_t first = 0; first < rows.size(); first += kRowsAtOnce) {
    const auto some = rows.subspan(first, std::min<size_t>(kRowsAtOnce, rows.size() - first));
    read(some, RowUse::kBeside, work);
    for (const uint32_t row : some) cache_.release(row);
  }
  for (size_t first = 0; first < rows.size(); first += per_log_page) {
    const auto some = rows.subspan(first, std::min<size_t>(per_log_page, rows.size() - first));
    const auto number = static_cast<uint32_t>(tail_ + log_.size());
    for (const uint32_t row : some) index_.set(row, number);
    log_.emplace_back(some.begin(), some.end());
  }
  work.log_bytes += row_traffic(rows, shape_.row).log;
  return work;
}

RowWork RowDevice::merge_some() {
  RowWork work;
  if (used() > 0 && used() * 4 > shape_.log_pages * 3) merge(work);
  return work;
}

/// The oldest pages' records that have no newer one go home, in one batch.
void RowDevice::merge(RowWork& work) {
  const uint64_t page_bytes = base::page_bytes(shape_.row.record_bytes);
  const uint64_t per_page = base::records_per_page(shape_.row.record_bytes);
  const uint64_t batch_max =
      std::max(8 * shape_.row.log_page_records,
               std::min(base::kRowMergeRecordsMax, base::kRowMergeBytes / page_bytes));
  uint64_t taken = 0;
  uint64_t log_pages = 0;
  pages_.clear();
  while (!log_.empty() && taken + log_.front().size() <= batch_max) {
    for (const uint32_t row : log_.front()) {
      if (index_.find(row) != tail_) continue;
      index_.erase(row);
      pages_.push_back(static_cast<uint32_t>(row / per_page));
      ++taken;
    }
    ++log_pages;
    log_.pop_front();
    ++tail_;
  }
  make_distinct(pages_);
  const uint64_t entries = pages_.size() * (base::kRowMergeEntryBytesMin - 2) + taken * 2;
  const uint64_t merge_pages = base::divide_up(entries, shape_.row.log_page_bytes);
  for (uint64_t i = 0; i < merge_pages; ++i) log_.emplace_back();
  ++work.merges;
  work.merged_rows += taken;
  work.merge_reads += pages_.size();
  work.merge_read_bytes += pages_.size() * page_bytes + log_pages * shape_.row.log_page_bytes;
  work.merge_writes += transfers_of(pages_, page_bytes);
  work.merge_written_bytes +=
      pages_.size() * page_bytes + merge_pages * shape_.row.log_page_bytes + kHeaderBytes;
}

}  // namespace smartinf::plan
