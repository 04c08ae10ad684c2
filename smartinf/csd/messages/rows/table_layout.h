// How a device's file keeps the tables of a run: the description that all devices carry, the file's
// layout that follows from it, and the scalars of earlier steps, which tables that catch up need.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/messages/rows/rows.h"
#include "smartinf/plan/row_schedule.h"
#include "smartinf/storage/row_layout.h"

namespace smartinf::csd {

/// All that decides which row lies where, and what rows are that were never put.
struct RunTables {
  std::vector<TableShape> tables;
  std::vector<uint8_t> chunks;  // plan::RowPlacement's pattern
};

/// Text of a row file's layout: fields are in docs/format.md.
std::string to_json(const RunTables& tables);
/// Errors: kCorrupt for text that to_json() did not write.
base::Result<RunTables> run_tables_from_json(std::string_view text);
/// For people: "ngram: 1000 rows of 64, state, sparse_adam".
std::string text_of(const TableShape& table);
std::string text_of(const RunTables& tables);

/// A device's part of them.
struct DeviceTables {
  storage::RowFileLayout layout;
  std::vector<plan::RowPlacement> placements;  // of each table
  /// Tables of the layout that keep the scalars of steps, by table; 0: it does not catch up.
  std::vector<uint32_t> steps_tables;
};
/// Errors: kInvalidArgument, more rows than a device numbers.
base::Result<DeviceTables> device_tables(const RunTables& tables, const storage::RunId& run,
                                         uint32_t device_index, uint32_t device_count,
                                         uint64_t log_bytes);

/// Steps that a table that catches up takes; each is a row of its steps table.
inline constexpr uint64_t kStepsMax = uint64_t{1} << 18;
inline uint64_t step_of(const kernels::RowScalars& scalars) { return scalars.step.step; }
/// A record of a steps table.
std::vector<std::byte> encode_step(const kernels::RowScalars& scalars);
using ReadRows =
    std::function<base::Status(std::span<const uint32_t> rows,
                               const std::function<void(size_t, std::span<const std::byte>)>&)>;
/// The scalars of all steps, ascending. read: from the steps table, as storage::RowFile::read().
/// Errors: kCorrupt; of reading.
base::Result<std::vector<kernels::RowScalars>> read_steps(const ReadRows& read);
/// Brings a record of a table that catches up over those of the steps that it has missed.
void bring_up(std::span<const kernels::RowScalars> steps, std::span<std::byte> record);

}  // namespace smartinf::csd
