// The messages of row tables: tables of which a step touches few rows, kept on devices with the
// state of their rule. Rows cross the link, pages never. A table of kind state is changed in a step
// and committed with the blocks, by the same Prepare and Commit; it is served beside everything
// else, in the order of its own messages.
//
// A device numbers its rows of a table from 0 (plan::RowPlacement). Rows of a message are u32,
// ascending, each once, as bytes; values are in their order.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "smartinf/base/choice.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/row_rules.h"
#include "smartinf/storage/row_file.h"

namespace smartinf::csd {

class DeviceSpace;  // device_space.h

/// A table as all devices of a run together hold it.
struct TableShape {
  std::string name;
  storage::RowTableKind kind = storage::RowTableKind::kState;
  kernels::RowRule rule = kernels::RowRule::kSparseAdam;
  uint32_t dim = 0;         // f32 values of a row
  uint64_t rows = 0;        // of all devices
  kernels::RowStart start;  // of state: weights that were never put

  /// A row that was left out for some steps is brought up when it is next read (kernels::catch_up).
  bool catches_up() const {
    return kind == storage::RowTableKind::kState && rule == kernels::RowRule::kAdamW;
  }
  /// Bytes of a row on the device. Data and scratch are weights alone.
  uint64_t record_bytes() const {
    return kind == storage::RowTableKind::kState ? kernels::record_bytes(rule, dim)
                                                 : uint64_t{dim} * sizeof(float);
  }
};

/// The first message of the family. With `create` the file is made, its rows are initial until
/// PutRows; else what the committed step has is taken up. Errors: kUnsupported, the device was
/// opened without memory for tables (DeviceInfo::row_memory_bytes) or cannot keep them;
/// kMismatch, other tables are there: both are named; kNoSpace with what is needed and free;
/// kOutOfMemory; kCorrupt; kFailedPrecondition, the tables are open; the drive's.
struct OpenTables {
  static constexpr std::string_view kName = "open tables";
  std::vector<TableShape> tables;
  std::vector<uint8_t> pattern;  // plan::RowPlacement's
  uint32_t device_index = 0;
  uint32_t device_count = 1;
  uint64_t log_bytes = 0;  // of the drive, for records on their way home
  bool create = false;
};

/// Weights of rows come up. keep: an UpdateRows of them will follow, so that they stay in the cache
/// if there is room. Errors: kInvalidArgument; kCorrupt; the drive's.
struct GatherRows {
  static constexpr std::string_view kName = "gather rows";
  uint32_t table = 0;
  base::DataType type = base::DataType::kF32;
  bool keep = false;
  std::span<const std::byte> rows;
  std::span<std::byte> out;  // [rows][dim] of type
};

/// A hint that changes no result: rows that will be gathered are read into the cache.
struct PrefetchRows {
  static constexpr std::string_view kName = "prefetch rows";
  uint32_t table = 0;
  std::span<const std::byte> rows;
};

/// In a step: updates rows of a state table; each row at most once in a step. Without rows it only
/// says the scalars of a step to a table that catches up. Errors: as GatherRows; kNoSpace, the log
/// is full; kFailedPrecondition outside of a step. After an error the step can only be aborted.
struct UpdateRows {
  static constexpr std::string_view kName = "update rows";
  uint32_t table = 0;
  base::DataType gradient_type = base::DataType::kF32;
  kernels::RowScalars scalars;
  uint64_t rows_of_step = 0;  // of all messages of the step to the device: what its log takes
  std::span<const std::byte> rows;
  std::span<const std::byte> gradients;  // [rows][dim] of gradient_type
};

/// Weights of rows, or whole records, as they are from now on: of a state table before its first
/// step is committed, of a data table until it is committed, of a scratch table at any time.
struct PutRows {
  static constexpr std::string_view kName = "put rows";
  uint32_t table = 0;
  bool records = false;
  std::span<const std::byte> rows;
  std::span<const std::byte> values;  // [rows][dim] f32; or [rows][record bytes]
};

/// Adds to rows of a scratch table, in f32.
struct ScatterAddRows {
  static constexpr std::string_view kName = "scatter-add rows";
  uint32_t table = 0;
  std::span<const std::byte> rows;
  std::span<const std::byte> values;  // [rows][dim] f32
};

/// Whole records [first, first + count), brought up where the table catches up: for export.
struct ReadRecords {
  static constexpr std::string_view kName = "read records";
  uint32_t table = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  std::span<std::byte> records;  // [count][record bytes]
};

using RowsMessage = std::variant<OpenTables, GatherRows, PrefetchRows, UpdateRows, PutRows,
                                 ScatterAddRows, ReadRecords>;

/// Whether a device's message is one of them.
template <typename Message>
bool is_rows_message(const Message& message) {
  return [&]<typename... Messages>(const std::variant<Messages...>*) {
    return (std::holds_alternative<Messages>(message) || ...);
  }(static_cast<const RowsMessage*>(nullptr));
}

/// The rows of a message; the memory is aligned to them.
inline std::span<const uint32_t> row_numbers(std::span<const std::byte> rows) {
  return {reinterpret_cast<const uint32_t*>(rows.data()), rows.size() / sizeof(uint32_t)};
}
/// The other way.
inline std::span<const std::byte> row_bytes(std::span<const uint32_t> rows) {
  return std::as_bytes(rows);
}

/// Rows of one message, at most.
inline constexpr uint64_t kRowsOfMessageMax = 1 << 16;

/// Of what both ends of a message know: sizes; rows are the device's to see.
base::Status check(const OpenTables& message, const DeviceSpace& space);
base::Status check(const GatherRows& message, const DeviceSpace& space);
base::Status check(const PrefetchRows& message, const DeviceSpace& space);
base::Status check(const UpdateRows& message, const DeviceSpace& space);
base::Status check(const PutRows& message, const DeviceSpace& space);
base::Status check(const ScatterAddRows& message, const DeviceSpace& space);

template <typename Wire>
void describe(Wire& wire, TableShape& shape) {
  auto& [name, kind, rule, dim, rows, start] = shape;
  wire(name, base::choice(kind, storage::RowTableKind::kScratch),
       base::choice(rule, kernels::RowRule::kAdamW), dim, rows, start.deviation, start.seed);
}
template <typename Wire>
void describe(Wire& wire, OpenTables& message) {
  auto& [tables, pattern, device_index, device_count, log_bytes, create] = message;
  wire(tables, pattern, device_index, device_count, log_bytes, create);
}
template <typename Wire>
void describe(Wire& wire, GatherRows& message) {
  auto& [table, type, keep, rows, out] = message;
  wire(table, base::choice(type, base::DataType::kF16), keep, rows, out);
}
template <typename Wire>
void describe(Wire& wire, PrefetchRows& message) {
  auto& [table, rows] = message;
  wire(table, rows);
}
template <typename Wire>
void describe(Wire& wire, UpdateRows& message) {
  auto& [table, gradient_type, scalars, rows_of_step, rows, gradients] = message;
  wire(table, base::choice(gradient_type, base::DataType::kF16), scalars, rows_of_step, rows,
       gradients);
}
template <typename Wire>
void describe(Wire& wire, PutRows& message) {
  auto& [table, records, rows, values] = message;
  wire(table, records, rows, values);
}
template <typename Wire>
void describe(Wire& wire, ScatterAddRows& message) {
  auto& [table, rows, values] = message;
  wire(table, rows, values);
}
template <typename Wire>
void describe(Wire& wire, ReadRecords& message) {
  auto& [table, first, count, records] = message;
  wire(table, first, count, records);
}

template <typename Visit, typename Space>
void memory(Visit& visit, GatherRows& message, const Space&) {
  visit.down(message.rows);
  visit.up(message.out, base::SubgroupId{});
}
template <typename Visit, typename Space>
void memory(Visit& visit, PrefetchRows& message, const Space&) {
  visit.down(message.rows);
}
template <typename Visit, typename Space>
void memory(Visit& visit, UpdateRows& message, const Space&) {
  visit.down(message.rows);
  visit.down(message.gradients);
}
template <typename Visit, typename Space>
void memory(Visit& visit, PutRows& message, const Space&) {
  visit.down(message.rows);
  visit.down(message.values);
}
template <typename Visit, typename Space>
void memory(Visit& visit, ScatterAddRows& message, const Space&) {
  visit.down(message.rows);
  visit.down(message.values);
}
template <typename Visit, typename Space>
void memory(Visit& visit, ReadRecords& message, const Space&) {
  visit.up(message.records, base::SubgroupId{});
}

}  // namespace smartinf::csd
