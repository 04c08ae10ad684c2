// Tables of a stored run (row_tables.h), put together from its devices' files: read by rows of the
// run, and brought onto other devices. A range of rows at a time, never a whole table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/messages/rows/table_layout.h"
#include "smartinf/csd/snapshot.h"

namespace smartinf::engine {

/// Threads: one at a time.
class StoredTables {
 public:
  /// devices: of one run, in its order, at the step that was chosen; they outlive it. Those that
  /// another process has are left to it. Where each of several ranks has a run of its own, they may
  /// be those of one rank, or of all, rank by rank. Null: the run has no tables. Errors: of
  /// csd::Snapshot::tables(); kUnsupported for a device that cannot give its tables; kMismatch for
  /// devices whose tables are not of one run.
  static base::Result<std::unique_ptr<StoredTables>> open(std::span<csd::Snapshot* const> devices);

  /// Whether all devices that have rows of the tables are here.
  bool whole() const { return std::ranges::count(devices_, nullptr) == 0; }
  const csd::RunTables& tables() const { return tables_; }
  /// Log of all devices together.
  uint64_t log_bytes() const { return log_bytes_; }
  /// Records of all tables that are copied, if all of them were written.
  uint64_t bytes() const;

  using Visit = std::function<base::Status(uint64_t row, std::span<const std::byte> records)>;
  using Wanted = std::function<bool(uint64_t row)>;
  /// Records of rows [first, first + count), in order, as kernels/row_rules.h lays them out, each
  /// checked, and brought up to the run's step where the table catches up; some rows at a time.
  /// initial: also rows that were never written, as they begin. wanted: others are not read; null:
  /// all are. What `visit` returns ends the call. Errors: kCorrupt with table, rows and place; kIo;
  /// kUnsupported for rows of a device that is not here.
  base::Status read(size_t table, uint64_t first, uint64_t count, bool initial, const Visit& visit,
                    const Wanted& wanted = nullptr);

  /// Writes what a new device has of all tables, bit for bit. progress: bytes done by this call so
  /// far; what it returns ends the call.
  base::Status copy_to(const csd::DeviceTables& device, csd::NewState& to,
                       const std::function<base::Status(uint64_t)>& progress);

 private:
  StoredTables() = default;

  /// Rows of a batch, and their records: those that were never written are empty.
  struct Batch {
    std::vector<uint64_t> rows;  // ascending
    std::vector<std::byte> records;
    std::vector<bool> written;
  };
  base::Status fetch(size_t table, Batch& batch);

  csd::RunTables tables_;
  std::vector<csd::RowSnapshot*> devices_;  // that have rows of the tables; null: not here
  csd::RowSnapshot* any_ = nullptr;         // of devices_
  csd::DeviceTables layout_;                // any_'s
  uint64_t log_bytes_ = 0;
  std::vector<std::vector<kernels::RowScalars>> steps_;  // of tables that catch up
};

}  // namespace smartinf::engine
