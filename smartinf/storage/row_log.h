// The log of a file of tables' rows: a ring of pages, each with the checksum of the one before, so
// that one checksum vouches for all of them up to the end that a step commits.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/storage/row_format.h"
#include "smartinf/storage/row_pump.h"

namespace smartinf::storage {

/// Threads: one at a time. `pump`, `geometry` and `seeds` outlive it.
class RowLog {
 public:
  struct Mark {
    uint64_t head = 0;   // pages before it, numbered from 0 for the file's life, are in the log
    uint64_t chain = 0;  // checksum of the last of them
  };

  RowLog(RowPump& pump, const RowGeometry& geometry, const RowSeeds& seeds);
  static uint64_t memory_bytes(const RowGeometry& geometry) {
    return geometry.log_pages * sizeof(uint32_t);
  }

  uint64_t tail() const { return tail_; }
  uint64_t head() const { return head_; }
  uint64_t used() const { return head_ - tail_; }
  /// Where the log is taken up, and when pages before `tail` are not needed any more.
  void set_ends(uint64_t tail, const Mark& mark);
  void set_tail(uint64_t tail) { tail_ = tail; }
  /// The end; no page is open.
  Mark mark() const { return {head_, chain_}; }

  /// Slot in the ring of the page that the next record of this table goes to, which then has a
  /// place there: page bytes and the record's index. Nullopt: there would be fewer than `keep` free
  /// pages then.
  struct Place {
    uint32_t slot = 0;
    std::span<std::byte> record;
  };
  base::Result<std::optional<Place>> append(uint32_t table, uint32_t row, base::StepNumber step,
                                            uint64_t keep);
  /// Begins a merge page; its head but for the chain is the caller's to fill, as its entries are.
  base::Result<std::span<std::byte>> begin_merge_page();
  /// Ends the page that is open and waits for all that was written. Not synced. Errors: of this and
  /// earlier writes.
  base::Status flush();
  /// Goes back to a mark, and forgets failures of writes.
  base::Status roll_back(const Mark& mark);

  /// The page in a slot, if it is still in memory: as written or yet to be; else empty.
  std::span<const std::byte> in_memory(uint32_t slot) const;
  uint64_t number_of(uint32_t slot) const {
    const uint64_t pages = geometry_.log_pages;
    return tail_ + (slot + pages - tail_ % pages) % pages;
  }
  /// Whether a page that was read is the one that was written.
  bool verify(uint64_t number, std::span<const std::byte> page) const;
  base::Status damaged(uint64_t number) const;
  /// Takes up a page of an opened log: its end is behind it. False: it does not follow the one
  /// before. any_chain: it is the first one.
  bool accept(uint64_t number, std::span<const std::byte> page, bool any_chain);

  /// Reads pages [from, to) in order, while visit says true. Nothing is appended meanwhile.
  base::Status read(uint64_t from, uint64_t to,
                    const std::function<base::Result<bool>(uint64_t, std::span<std::byte>)>& visit);

  static LogPageHead head_of(std::span<const std::byte> page) { return load<LogPageHead>(page, 0); }
  std::span<const uint32_t> rows_of(std::span<const std::byte> page) const;
  std::span<const std::byte> record_of(std::span<const std::byte> page, uint64_t i) const;

 private:
  struct Chunk {
    uint64_t first = 0;    // page
    uint64_t pages = 0;    // begun
    uint64_t written = 0;  // handed to the drive
  };
  uint64_t pages_per_chunk() const { return geometry_.chunk_bytes / geometry_.log_page_bytes; }
  std::span<std::byte> page_in(size_t chunk, uint64_t i) const {
    return pump_.chunks()[chunk].memory.subspan(i * geometry_.log_page_bytes,
                                                geometry_.log_page_bytes);
  }
  uint64_t record_offset(uint32_t table) const {
    return sizeof(LogPageHead) + sizeof(uint32_t) * geometry_.tables[table].records_per_log_page;
  }
  base::Status begin_page();
  void seal_open();
  void start_write();
  void forget_chunks();

  RowPump& pump_;
  const RowGeometry& geometry_;
  const RowSeeds& seeds_;
  uint64_t tail_ = 0;
  uint64_t head_ = 0;
  uint64_t chain_ = 0;
  std::vector<uint32_t> sums_;  // lower halves of checksums, by slot
  std::array<Chunk, RowGeometry::kChunks> chunks_{};
  size_t chunk_ = 0;           // that is being filled
  std::span<std::byte> open_;  // page head_ - 1, while records are added to it
};

}  // namespace smartinf::storage
