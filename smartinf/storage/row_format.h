// Bytes of a file of tables' rows: where everything lies, and what is in its header, in pages of
// its log and in the record that a step commits. See docs/format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/checksum.h"
#include "smartinf/base/row_pages.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/row_layout.h"

namespace smartinf::storage {

inline constexpr uint32_t kRowFormatVersion = 1;
inline constexpr uint64_t kRowMagic = 0x52464e4954524d53u;        // SMRTINFR
inline constexpr uint64_t kRowLayoutMagic = 0x4c464e4954524d53u;  // SMRTINFL
inline constexpr uint64_t kRowHeaderBytes = 4096;
inline constexpr uint64_t kRowHeaderStride = 64 * 1024;  // one damaged span takes one copy
inline constexpr uint32_t kRowHeaderCopies = 2;          // of each of the two places
inline constexpr uint64_t kRowLayoutOffset = 2 * kRowHeaderCopies * kRowHeaderStride;
inline constexpr uint64_t kRowLayoutBytesMax = 16 * base::kMiB;

inline constexpr uint64_t header_offset(uint64_t place, uint64_t copy) {
  return (place + 2 * copy) * kRowHeaderStride;
}

struct RowHeader {
  uint32_t version = kRowFormatVersion;
  RunId file;  // random: no page of an earlier file at this path is taken for one of this
  uint64_t sequence = 0;  // the highest one counts; its place is sequence % 2
  uint64_t layout_bytes = 0;
  uint64_t layout_sum = 0;
  uint64_t tail = 0;               // of the log: records of pages before it are at home
  uint64_t generations_place = 0;  // of the two
  uint64_t generations_sum = 0;
  uint64_t generations_from = 0;  // merge pages of the log from here on are not in them; >= tail
};

void encode(const RowHeader& header, std::span<std::byte> out);
/// Nullopt: not whole, or nothing was ever there.
std::optional<RowHeader> decode_row_header(std::span<const std::byte> bytes);

std::vector<std::byte> encode(const RowFileLayout& layout);
std::optional<RowFileLayout> decode_row_layout(std::span<const std::byte> bytes);

/// The log's end at a step: what its commit makes the newest records.
struct RowCommit {
  RunId file;
  uint64_t head = 0;   // pages before it count
  uint64_t chain = 0;  // the checksum of the last of them; 0 if there was none
  std::string tables;  // for messages: "ngram and 2 more"
};
std::string encode(const RowCommit& commit);
std::optional<RowCommit> decode_row_commit(std::string_view text);

/// What the record says of its tables, or that it is not understood.
std::string tables_of_row_commit(std::string_view text);

enum class LogPageKind : uint8_t { kData = 1, kMerge = 2 };

/// The beginning of a page of the log; its last 8 bytes are its checksum. A data page goes on with
/// u32 row{RowGeometry::Table::records_per_log_page} and count records, a merge page with count
/// entries of pages that are written home.
struct LogPageHead {
  uint64_t chain = 0;  // the checksum of the page before
  uint64_t step = 0;   // of a data page
  uint64_t tail = 0;   // of a merge page: the log's when its batch is at home
  uint32_t table = 0;  // of a data page
  uint16_t count = 0;
  LogPageKind kind = LogPageKind::kData;
  uint8_t last = 0;  // of a merge page: it completes its batch
};
static_assert(sizeof(LogPageHead) == 32);

/// An entry of a merge page, with `count` slots of u16 behind it: of the records that change.
struct MergeEntry {
  uint32_t page = 0;
  uint16_t table = 0;
  uint16_t count = 0;
  uint64_t masked_sum =
      0;  // of the page with zeros in place of these records, without its checksum
};
static_assert(sizeof(MergeEntry) == 16);
inline constexpr uint64_t kMergeEntryBytesMin = sizeof(MergeEntry) + sizeof(uint16_t);

/// For whoever has rows that are not what was written.
inline constexpr std::string_view kDamagedRowsAdvice =
    "Restore a checkpoint (smartinf restore). Look at the drive's health (smartctl -a).";

inline constexpr uint64_t kPageSumBytes = sizeof(uint64_t);

template <typename T>
T load(std::span<const std::byte> bytes, uint64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}
template <typename T>
void store(std::span<std::byte> bytes, uint64_t offset, const T& value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
}
/// The checksum at a page's end, and that of what is before it.
inline uint64_t stored_sum(std::span<const std::byte> page) {
  return load<uint64_t>(page, page.size() - kPageSumBytes);
}
inline uint64_t page_sum(std::span<const std::byte> page, uint64_t seed) {
  return base::checksum(page.first(page.size() - kPageSumBytes), seed);
}
inline bool whole(std::span<const std::byte> page, uint64_t seed) {
  return page_sum(page, seed) == stored_sum(page);
}
inline void seal(std::span<std::byte> page, uint64_t seed) {
  store(page, page.size() - kPageSumBytes, page_sum(page, seed));
}

/// Generation 0: the page was never written.
constexpr uint8_t next_generation(uint8_t generation) {
  return generation == 255 ? uint8_t{1} : static_cast<uint8_t>(generation + 1);
}

/// Places and sizes that follow from a layout. A batch of a merge holds the records of eight pages
/// of the log at least, so that it frees more of them than its own pages take.
struct RowGeometry {
  struct Table {
    RowTableKind kind = RowTableKind::kState;
    uint64_t record_bytes = 0;
    uint64_t page_bytes = 0;
    uint64_t records_per_page = 0;
    uint64_t records_per_log_page = 0;
    uint64_t rows = 0;
    uint64_t pages = 0;
    uint64_t first_page = 0;    // in the generations of all tables
    uint64_t offset_bytes = 0;  // of its homes
    uint64_t first_key = 0;     // of its rows in the index
  };
  static constexpr uint64_t kMergeRecordsMax = base::kRowMergeRecordsMax;
  static constexpr uint64_t kMergeBytes = base::kRowMergeBytes;
  static constexpr uint64_t kChunkBytes = 256 * base::kKiB;  // of the log, at once
  static constexpr uint32_t kChunks = 4;
  static constexpr uint64_t kReadBytes = 32 * base::kKiB;  // adjacent pages, at once
  static constexpr uint32_t kReadsMax = 128;  // so that the drive has enough while pages are used

  RowGeometry() = default;
  explicit RowGeometry(const RowFileLayout& layout);

  uint64_t generations_offset(uint64_t place) const {
    return generations_offset_bytes + place * generations_bytes;
  }
  uint64_t log_offset(uint64_t number) const {
    return log_offset_bytes + number % log_pages * log_page_bytes;
  }
  uint64_t log_payload() const { return log_page_bytes - sizeof(LogPageHead) - kPageSumBytes; }
  uint64_t home_offset(const Table& table, uint64_t page) const {
    return table.offset_bytes + page * table.page_bytes;
  }
  uint64_t log_pages_min() const { return 2 * merge_pages_max + 8; }

  std::vector<Table> tables;
  uint64_t layout_bytes = 0;  // of one copy, padded
  uint64_t pages = 0;         // homes of all tables
  uint64_t generations_offset_bytes = 0;
  uint64_t generations_bytes = 0;  // of one place, padded
  uint64_t log_offset_bytes = 0;
  uint64_t log_page_bytes = 0;
  uint64_t log_pages = 0;
  uint64_t log_records_max = 0;   // of a full log
  uint64_t chunk_bytes = 0;       // whole pages of the log
  uint64_t read_bytes = 0;        // one page of any kind at least
  uint64_t merge_pages_max = 0;   // of the log, of one batch
  uint64_t merge_home_bytes = 0;  // of one batch
  uint64_t merge_staged_bytes = 0;
  uint64_t file_bytes = 0;
};

/// What checksums of a file's pages are seeded with.
class RowSeeds {
 public:
  RowSeeds() = default;
  RowSeeds(const RowFileLayout& layout, const RunId& file);
  uint64_t log_page(uint64_t number) const { return base::mix_seed(log_, number); }
  uint64_t home(uint32_t table, uint64_t page, uint8_t generation) const {
    const uint64_t place = base::mix_seed(base::mix_seed(file_, table + uint64_t{1}), page);
    return base::mix_seed(place, generation);
  }
  uint64_t masked(uint32_t table, uint64_t page) const { return home(table, page, 0); }
  uint64_t generations(uint64_t from) const { return base::mix_seed(~file_, from); }

 private:
  uint64_t file_ = 0;
  uint64_t log_ = 0;
};

}  // namespace smartinf::storage
