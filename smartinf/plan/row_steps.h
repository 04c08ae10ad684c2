// A device's part of a table while steps go by, without its bytes: which rows are cached, which
// wait in the log, and what the drive reads and writes. The simulator counts by it. It follows
// csd::RowsAccess and storage::RowFile, with the cache's queues and the pages of both.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "smartinf/base/row_map.h"
#include "smartinf/plan/row_queues.h"
#include "smartinf/plan/row_schedule.h"

namespace smartinf::plan {

/// Bytes of a device's log, where nobody has said them: a quarter of the homes, as far as its index
/// leaves half of the memory to the cache.
uint64_t row_log_bytes(uint64_t home_bytes, uint64_t record_bytes, uint64_t memory_bytes);

struct RowDeviceShape {
  RowShape row;
  uint64_t rows = 0;  // of the device
  uint64_t log_pages = 0;
  uint64_t fixed_bytes = 0;  // of memory: buffers, generations, the log's index
  uint64_t cache_rows = 0;

  /// value_bytes: of weights and gradients on their way. log_bytes 0: chosen. Without enough memory
  /// cache_rows is 0 and fixed_bytes are above memory_bytes.
  static RowDeviceShape make(uint64_t rows, uint64_t dim, uint64_t record_bytes,
                             uint64_t value_bytes, uint64_t memory_bytes, uint64_t log_bytes);
  /// Size of the device's file, all but a few pages.
  uint64_t file_bytes() const;
};

/// What one call asks of the device. Pages are of 4 KiB, or larger where one record is.
struct RowWork {
  uint64_t rows = 0;
  uint64_t cached = 0;      // of them
  uint64_t reads = 0;       // transfers of adjacent pages
  uint64_t read_bytes = 0;  // homes, and the log's pages
  uint64_t log_bytes = 0;   // written
  // Of merges.
  uint64_t merges = 0;
  uint64_t merged_rows = 0;
  uint64_t merge_reads = 0;
  uint64_t merge_read_bytes = 0;
  uint64_t merge_writes = 0;         // homes, as transfers
  uint64_t merge_written_bytes = 0;  // with the log's pages and headers

  RowWork& operator+=(const RowWork& other);
};

class RowDevice {
 public:
  explicit RowDevice(const RowDeviceShape& shape);

  const RowDeviceShape& shape() const { return shape_; }
  /// rows: ascending, each once; they are updated in the same step.
  RowWork gather(std::span<const uint32_t> rows);
  /// The same rows. Merges first, where the log has no room for the step.
  RowWork update(std::span<const uint32_t> rows);
  /// Ends the step.
  void commit() { cache_.release_all(); }
  /// A batch that goes home while the device has nothing else to do; no merge: the log is empty
  /// enough.
  RowWork merge_some();

 private:
  void read(std::span<const uint32_t> rows, RowUse use, RowWork& work);
  void merge(RowWork& work);
  uint64_t used() const { return log_.size(); }

  RowDeviceShape shape_;
  RowQueues cache_;
  base::RowMap index_;                     // row -> number of its newest record's page in the log
  std::deque<std::vector<uint32_t>> log_;  // rows of its pages; of a merge's there are none
  uint32_t tail_ = 0;                      // number of log_.front()
  std::vector<uint32_t> pages_;            // of a read
};

}  // namespace smartinf::plan
