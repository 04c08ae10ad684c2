// Pages of a table whose rows lie on devices: whole records from the page's start on, then zeros,
// and a checksum in its last 8 bytes. A record never straddles two pages, so one read finds a row
// and one checksum vouches for it. New records wait in pages of a log.
#pragma once

#include <algorithm>
#include <cstdint>

#include "smartinf/base/units.h"

namespace smartinf::base {

/// Drives read and write in units of this; a page is one unit, or as many as one record needs.
inline constexpr uint64_t kRowPageUnit = 4096;
inline constexpr uint64_t kRowPageChecksumBytes = 8;

/// record_bytes > 0.
constexpr uint64_t page_bytes(uint64_t record_bytes) {
  return round_up(record_bytes + kRowPageChecksumBytes, kRowPageUnit);
}
constexpr uint64_t records_per_page(uint64_t record_bytes) {
  return (page_bytes(record_bytes) - kRowPageChecksumBytes) / record_bytes;
}
/// Pages of so many records.
constexpr uint64_t row_pages(uint64_t records, uint64_t record_bytes) {
  return divide_up(records, records_per_page(record_bytes));
}

inline constexpr uint64_t kRowLogHeadBytes = 32;    // of a page of the log
inline constexpr uint64_t kRowLogRecordsMax = 256;  // of such a page
/// What a page of the log says of a home that is written is 18 bytes at least.
inline constexpr uint64_t kRowMergeEntryBytesMin = 18;
/// A merge brings home so many records, and changes so many bytes of homes, at most.
inline constexpr uint64_t kRowMergeRecordsMax = 2048;
inline constexpr uint64_t kRowMergeBytes = 8 * kMiB;

/// A page of the log has room for one record at least, with the number of its row.
constexpr uint64_t row_log_page_bytes(uint64_t record_bytes) {
  return round_up(kRowLogHeadBytes + sizeof(uint32_t) + record_bytes + kRowPageChecksumBytes,
                  kRowPageUnit);
}
/// Entries for all of its records take three quarters of a page at most.
constexpr uint64_t records_per_row_log_page(uint64_t log_page_bytes, uint64_t record_bytes) {
  const uint64_t payload = log_page_bytes - kRowLogHeadBytes - kRowPageChecksumBytes;
  return std::max<uint64_t>(
      1, std::min({payload / (sizeof(uint32_t) + record_bytes),
                   payload * 3 / 4 / kRowMergeEntryBytesMin, kRowLogRecordsMax}));
}

static_assert(page_bytes(4088) == 4096 && page_bytes(4089) == 8192);
static_assert(records_per_page(772) == 5 && records_per_page(5000) == 1);

}  // namespace smartinf::base
