// Which device has which row of a table, what a batch of row numbers asks of each device, and what
// that reads, writes and sends. Pure, so that the engine and the simulator cannot differ.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::plan {

/// Devices of the chunks of a table, in an order that repeats: each as often as its share asks, at
/// least once, and spread evenly; one whose share is 0 never. The same shares give the same pattern
/// on every machine. shares: at most 256, not negative, one of them above 0 (SI_CHECK).
std::vector<uint8_t> row_pattern(std::span<const double> shares);

/// Rows of a table on their devices, in chunks of a page's records: chunk i lies on the device
/// pattern[i % pattern.size()]. Rows of a device are numbered by themselves, in the table's order.
class RowPlacement {
 public:
  /// chunk_rows: base::records_per_page(). Errors: kInvalidArgument, no rows, or more of them on a
  /// device than 32 bits number.
  static base::Result<RowPlacement> make(uint64_t rows, std::vector<uint8_t> pattern,
                                         uint64_t chunk_rows);

  // row < rows() (SI_CHECK in device_of()).
  uint32_t device_of(uint64_t row) const;
  uint32_t local_row(uint64_t row) const;
  /// local < rows_on(device).
  uint64_t global_row(uint32_t device, uint32_t local) const;
  /// 0 of a device that is not in the pattern.
  uint64_t rows_on(uint32_t device) const;

  uint64_t rows() const { return rows_; }
  /// The last one in the pattern, and 1.
  uint32_t devices() const { return static_cast<uint32_t>(slots_.size()); }

 private:
  uint64_t rows_ = 0;
  uint64_t chunk_rows_ = 1;
  std::vector<uint8_t> pattern_;
  std::vector<uint32_t> rank_;                // of a slot of the pattern among its device's
  std::vector<std::vector<uint32_t>> slots_;  // of each device, ascending
};

/// Distinct rows of a batch, by device and there ascending.
struct RowBatch {
  std::vector<std::vector<uint32_t>> rows;  // [placement.devices()], numbered by their devices
  std::vector<uint32_t> place;  // [ids]: of each id's row, counted through all devices' in order

  /// ids: rows of the table, in any order, repeats as well; fewer than 2^32 (SI_CHECK).
  static RowBatch make(const RowPlacement& placement, std::span<const int64_t> ids);
  size_t distinct() const;
};

/// A table's rows, as far as their bytes are concerned.
struct RowShape {
  uint64_t record_bytes = 0;
  uint64_t weights_bytes = 0;   // of a row, as the model takes it
  uint64_t gradient_bytes = 0;  // of a row, as it is sent
  uint64_t log_page_bytes = 0;
  uint64_t log_page_records = 0;
};

struct RowTraffic {
  uint64_t pages = 0;      // homes of the rows
  uint64_t read = 0;       // at the drive, if no row is in a cache or in the log
  uint64_t log = 0;        // written by the step; homes are written later
  uint64_t link_up = 0;    // weights
  uint64_t link_down = 0;  // row numbers, twice, and gradients

  RowTraffic& operator+=(const RowTraffic& other);
  bool operator==(const RowTraffic&) const = default;
};

/// Pages in which the rows lie. rows: of a device, ascending.
uint64_t pages_of(std::span<const uint32_t> rows, uint64_t record_bytes);

/// One device's part of a step that gathers its rows and updates all of them. rows: as above.
RowTraffic row_traffic(std::span<const uint32_t> rows, const RowShape& shape);

}  // namespace smartinf::plan
