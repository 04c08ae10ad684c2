// Records of a table's rows in a fixed amount of memory: the cache of a device that gathers rows,
// not pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/plan/row_queues.h"

namespace smartinf::csd {

/// The records of a plan::RowQueues. Threads: one.
class RowCache {
 public:
  RowCache(uint32_t record_bytes, uint64_t memory_bytes)
      : record_bytes_(record_bytes),
        queues_(memory_bytes / bytes_of_row(record_bytes)),
        records_(queues_.capacity() * record_bytes) {}

  uint64_t capacity() const { return queues_.capacity(); }
  /// Memory of a row with what finds it.
  static uint64_t bytes_of_row(uint32_t record_bytes) {
    return record_bytes + plan::RowQueues::kBytesOfRow;
  }

  /// Empty: the row is not there.
  std::span<std::byte> find(uint32_t row, plan::RowUse use) {
    return record(queues_.find(row, use));
  }
  /// Room for the record of a row that is not there; empty: all rows are kept.
  std::span<std::byte> insert(uint32_t row, plan::RowUse use) {
    return record(queues_.insert(row, use));
  }
  /// The row may be replaced again.
  void release(uint32_t row) { queues_.release(row); }
  void release_all() { queues_.release_all(); }
  void erase(uint32_t row) { queues_.erase(row); }
  void clear() { queues_.clear(); }

 private:
  std::span<std::byte> record(uint32_t slot) {
    if (slot == plan::RowQueues::kNone) return {};
    return std::span(records_).subspan(uint64_t{slot} * record_bytes_, record_bytes_);
  }

  const uint32_t record_bytes_;
  plan::RowQueues queues_;
  std::vector<std::byte> records_;
};

}  // namespace smartinf::csd
