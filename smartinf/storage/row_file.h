// The file of a device's rows of tables: homes of the rows, page by page, and a log that a step's
// new records are appended to, so that a step costs what it touches. The log's end is committed
// with the device's blocks, by the record that prepare() returns; homes are written later, many
// steps' records at a time (merge_some). See docs/format.md.
//
// Records are bytes here: their planes and rules are whose rows they are. A record of a kState
// table ends with the u32 step of its last update, which is never 2^32 - 1.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/row_map.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/row_format.h"
#include "smartinf/storage/row_layout.h"
#include "smartinf/storage/row_log.h"
#include "smartinf/storage/row_pump.h"

namespace smartinf::storage {

/// Threads: one at a time.
class RowFile {
 public:
  /// An upper bound of rows in all kState tables of a device, and in any one table.
  static constexpr uint64_t kRowsMax = 0xfffffffe;
  static constexpr uint64_t kTablesMax = 0xffff;

  /// Makes the file and reserves all of its space, in the place of one that was there. It is a
  /// run's once its first step is prepared; until then rows are put(). traffic: where its transfers
  /// are counted; it outlives the file. sparse: space is taken as rows are put, for a copy that is
  /// never trained with. Errors: kNoSpace with what is needed and free; kInvalidArgument, a table
  /// of too many rows, a log that is too small; kIo.
  static base::Result<std::unique_ptr<RowFile>> create(CachePlace place, RowFileLayout layout,
                                                       std::chrono::nanoseconds watchdog,
                                                       base::TrafficCounter& traffic,
                                                       bool sparse = false);
  /// Takes up the step whose prepare() returned commit_record, and finishes a merge that was
  /// interrupted. read_only: does not finish it, and reads rows as they will be.
  /// Errors: kFailedPrecondition, commit_record is empty: creation was interrupted; kMismatch,
  /// another run's or an older file; kCorrupt, with table, rows and place; kIo.
  static base::Result<std::unique_ptr<RowFile>> open(CachePlace place, const RunId& run,
                                                     std::string_view commit_record,
                                                     std::chrono::nanoseconds watchdog,
                                                     base::TrafficCounter& traffic,
                                                     bool read_only = false);
  /// Says what a file holds, whatever its state is. Errors: kCorrupt, kMismatch (version), kIo.
  static base::Result<RowFileLayout> peek(CachePlace place);

  /// Errors: kInvalidArgument as in create(), with the smallest log where that is too small.
  static base::Status check(const RowFileLayout& layout);
  /// Size of a file, and memory that it takes at most: buffers, generations and a full log's index.
  /// Of layouts that pass check().
  static uint64_t file_bytes(const RowFileLayout& layout);
  static uint64_t memory_bytes_max(const RowFileLayout& layout);

  ~RowFile();
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;

  const RowFileLayout& layout() const;
  const std::string& path() const;

  /// i: of the list of rows. record: empty for a row that was never written.
  using Visit = std::function<void(size_t i, std::span<const std::byte> record)>;
  /// Reads the newest records, those of the step in progress included. rows: distinct and
  /// ascending. Each page is read once; visits come in any order. Errors: kCorrupt with table, rows
  /// and place; kIo; then some were not visited.
  base::Status read(uint32_t table, std::span<const uint32_t> rows, const Visit& visit);
  /// Writes records to their homes; of kState and kData tables before the first commit only.
  /// rows: distinct and ascending; records: [rows.size()][record_bytes]. Errors:
  /// kFailedPrecondition, the table is committed; kCorrupt, kIo.
  base::Status put(uint32_t table, std::span<const uint32_t> rows,
                   std::span<const std::byte> records);

  /// Begins a step, as Store::begin_step does.
  void begin_step(base::StepNumber step);
  /// Appends new records of a kState table to the log. rows, records: as in put(); a row that comes
  /// again in a step has the later record. Errors: kNoSpace, the log is full, with what to do; kIo,
  /// of this call's writes or of earlier ones of the step. Then the step can only be aborted.
  base::Status append(uint32_t table, std::span<const uint32_t> rows,
                      std::span<const std::byte> records);
  /// Makes the step's records durable and returns the record to be committed with the blocks, a
  /// short text. Errors: kIo: the step can only be aborted.
  base::Result<std::string> prepare(base::StepNumber step);
  /// Makes the prepared step the current one.
  base::Status commit(base::StepNumber step);
  /// Forgets what the step has appended, prepared or not.
  base::Status abort(base::StepNumber step);

  /// Whether the log is full enough for merging to be worth while.
  bool wants_merge() const;
  /// Whether a step of so many records needs a merge first, and there is something to merge.
  bool must_merge(uint64_t records_to_come) const;
  /// Writes the records of the log's oldest pages home, a bounded batch of them, from so many pages
  /// at most. Only between a commit or an abort and the next step's first append. Errors: kCorrupt,
  /// kIo: the file is of no further use then; opening it again finishes the merge.
  base::Status merge_some(uint64_t log_pages_max = ~uint64_t{0});

  struct Counts {
    uint64_t home_pages_read = 0, log_pages_read = 0;  // by read()
    uint64_t records_appended = 0, log_bytes = 0;      // of steps
    uint64_t records_merged = 0, records_superseded = 0;
    uint64_t merge_read_bytes = 0;      // homes and log
    uint64_t merge_log_bytes = 0;       // merge pages
    uint64_t merge_home_bytes = 0;      // written
    uint64_t merge_metadata_bytes = 0;  // headers and generations
    uint64_t merges = 0;
  };
  Counts counts() const;
  /// Of the log, as bytes of its pages: in use, and all.
  uint64_t log_used_bytes() const;
  uint64_t log_room_bytes() const;

  /// Reads and checks every page that was written. found: a page that cannot be read or is not what
  /// was written. progress: bytes done and all; what it returns ends the call. Errors: those of
  /// progress.
  base::Status verify(const std::function<base::Status(uint64_t, uint64_t)>& progress,
                      const std::function<void(const base::Status&)>& found);
  /// See TransferQueue::close.
  base::Status close();

 private:
  struct Batch;       // of a merge
  struct Unfinished;  // a merge
  using Table = RowGeometry::Table;

  RowFile(CachePlace place, std::chrono::nanoseconds watchdog);
  base::Status take_layout(RowFileLayout layout, const RunId& file, base::TrafficCounter& traffic);
  base::Status reserve(bool sparse);
  base::Status read_header(base::TrafficCounter& traffic);
  base::Status write_header();
  base::Status write_generations();

  base::Status usable() const;
  uint8_t& generation(uint32_t table, uint64_t page) const;
  base::Status verify_home(uint32_t table, uint64_t page, std::span<const std::byte> bytes) const;
  base::Status damaged_home(uint32_t table, uint64_t page) const;
  void fill_unwritten(uint32_t table, std::span<std::byte> page) const;
  std::span<const std::byte> written(const Table& table, std::span<const std::byte> record) const;
  uint32_t key_of(const Table& table, uint32_t row) const {
    return static_cast<uint32_t>(table.first_key + row);
  }
  bool add_run(RowPump::Piece& piece, uint32_t table, uint64_t first, uint64_t pages) const;
  base::Status visit_log_page(uint32_t table, std::span<const std::byte> page, size_t begin,
                              size_t end, std::span<const uint32_t> rows, const Visit& visit);

  // row_merge.cc
  base::Status recover(const RowCommit& commit);
  base::Status lost() const;
  base::Status read_generations();
  base::Status read_committed(const RowCommit& commit);
  base::Status read_merges(Unfinished& unfinished);
  base::Status finish(const Unfinished& merge);
  base::Status accept_data(std::span<const std::byte> page, uint64_t number);
  base::Status accept_merge(std::span<const std::byte> page, uint64_t number);
  base::Status take_records(uint64_t until, Batch& batch);
  base::Status read_homes(Batch& batch);
  void change_homes(Batch& batch);
  base::Status append_merge_pages(const Batch& batch);
  base::Status write_home(const Batch& batch);

  std::string directory_;
  FileDescriptor descriptor_;
  uint64_t size_bytes_ = 0;
  std::unique_ptr<TransferQueue> queue_;  // until the pump has it

  RowFileLayout layout_;
  RowGeometry geometry_;
  RowSeeds seeds_;
  RowHeader header_;
  std::unique_ptr<RowPump> pump_;
  std::optional<RowLog> log_;
  base::RowMap index_;               // key of a row -> slot of its newest record's page
  base::AlignedBuffer generations_;  // by page of all tables
  Counts counts_;

  bool creating_ = false;  // nothing is committed
  bool read_only_ = false;
  bool failed_ = false;  // a merge: memory and drive may differ
  bool prepared_ = false;
  base::StepNumber step_ = 0;
  RowLog::Mark base_;            // where the step in progress begins
  uint64_t committed_head_ = 0;  // pages before it are merged
  struct Undo {
    uint32_t key = 0, slot = 0;  // before the step
  };
  std::vector<Undo> undo_;
  struct PageItem {
    uint64_t page = 0;
    size_t item = 0;
  };
  std::vector<PageItem> homes_, logs_;  // of a read
  std::vector<uint64_t> unfinished_;    // read_only_: pages of a merge, of all tables, ascending
};

/// Opens the file of a device that the record is of: kRowFileName, or kNewRowFileName where its
/// taking that one's place was interrupted; then it gets the name. place: opens either, as it is.
/// Errors: RowFile::open()'s; kNotFound.
base::Result<std::unique_ptr<RowFile>> open_row_file(
    const std::function<base::Result<CachePlace>(std::string_view name)>& place, const RunId& run,
    std::string_view commit_record, std::chrono::nanoseconds watchdog,
    base::TrafficCounter& traffic, bool read_only = false);
/// The same in a directory whose device nobody writes to, for reading.
base::Result<std::unique_ptr<RowFile>> open_rows_to_read(const std::string& directory,
                                                         const RunId& run,
                                                         std::string_view commit_record,
                                                         base::TrafficCounter& traffic);

}  // namespace smartinf::storage
