// Pages of a table whose rows lie on devices: whole records from the page's start on, then zeros,
// and a checksum in its last 8 bytes. A record never straddles two pages, so one read finds a row
// and one checksum vouches for it.
#pragma once

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

static_assert(page_bytes(4088) == 4096 && page_bytes(4089) == 8192);
static_assert(records_per_page(772) == 5 && records_per_page(5000) == 1);

}  // namespace smartinf::base
