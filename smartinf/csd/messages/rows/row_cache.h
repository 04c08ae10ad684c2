// Records of a table's rows in a fixed amount of memory: the cache of a device that gathers rows,
// not pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/plan/row_clock.h"

namespace smartinf::csd {

/// The records of a plan::RowClock's rows. Threads: one.
class RowCache {
 public:
  RowCache(uint32_t record_bytes, uint64_t memory_bytes)
      : record_bytes_(record_bytes),
        clock_(memory_bytes / bytes_of_row(record_bytes)),
        records_(clock_.capacity() * record_bytes) {}

  uint64_t capacity() const { return clock_.capacity(); }
  /// Memory of a row with what finds it.
  static uint64_t bytes_of_row(uint32_t record_bytes) {
    return record_bytes + plan::RowClock::kBytesOfRow;
  }

  /// Empty: the row is not there.
  std::span<std::byte> find(uint32_t row, bool keep) { return record(clock_.find(row, keep)); }
  /// Room for the record of a row that is not there; empty: all rows are kept.
  std::span<std::byte> insert(uint32_t row, bool keep) { return record(clock_.insert(row, keep)); }
  /// The row may be replaced again.
  void release(uint32_t row) { clock_.release(row); }
  void release_all() { clock_.release_all(); }
  void erase(uint32_t row) { clock_.erase(row); }
  void clear() { clock_.clear(); }

 private:
  std::span<std::byte> record(uint32_t slot) {
    if (slot == plan::RowClock::kNone) return {};
    return std::span(records_).subspan(uint64_t{slot} * record_bytes_, record_bytes_);
  }

  const uint32_t record_bytes_;
  plan::RowClock clock_;
  std::vector<std::byte> records_;
};

}  // namespace smartinf::csd
