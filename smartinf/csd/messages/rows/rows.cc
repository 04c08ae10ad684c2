#include "smartinf/csd/messages/rows/rows.h"

#include "smartinf/csd/device_space.h"

namespace smartinf::csd {

using base::ErrorCode;
using base::Status;

namespace {

// Bounds of what a message can make a device compute with: sums of products of them fit 64 bits.
constexpr size_t kTablesMax = 4096;
constexpr uint32_t kDimMax = 1 << 16;
constexpr uint64_t kRowsMax = uint64_t{1} << 40;

Status bad_rows(std::string_view what) {
  return Status(ErrorCode::kInvalidArgument, std::string(what));
}

/// per_row: bytes of `values` for a row must be a multiple of it.
Status check_rows(std::span<const std::byte> rows, size_t values_bytes, size_t per_row) {
  const uint64_t count = rows.size() / sizeof(uint32_t);
  if (rows.size() % sizeof(uint32_t) != 0 || count == 0 || count > kRowsOfMessageMax) {
    return bad_rows("a message of no or too many rows");
  }
  if (values_bytes % (count * per_row) != 0) return bad_rows("rows without their memory");
  return Status();
}

}  // namespace

Status check(const OpenTables& message, const DeviceSpace&) {
  if (message.tables.empty() || message.tables.size() > kTablesMax) {
    return bad_rows("no tables, or too many");
  }
  if (message.device_index >= message.device_count || message.pattern.empty()) {
    return bad_rows("a device that is none of those it is one of");
  }
  for (const uint8_t device : message.pattern) {
    if (device >= message.device_count) return bad_rows("rows of a device that is not there");
  }
  for (const TableShape& table : message.tables) {
    if (table.name.empty() || table.dim == 0 || table.dim > kDimMax || table.rows == 0 ||
        table.rows > kRowsMax || !(table.start.deviation >= 0)) {
      return bad_rows("a table of a shape that no model has");
    }
  }
  return Status();
}

Status check(const GatherRows& message, const DeviceSpace&) {
  return check_rows(message.rows, message.out.size(), base::data_type_bytes(message.type));
}
Status check(const PrefetchRows& message, const DeviceSpace&) {
  return check_rows(message.rows, 0, 1);
}
Status check(const UpdateRows& message, const DeviceSpace&) {
  if (message.rows.empty() && message.gradients.empty()) return Status();
  return check_rows(message.rows, message.gradients.size(),
                    base::data_type_bytes(message.gradient_type));
}
Status check(const PutRows& message, const DeviceSpace&) {
  return check_rows(message.rows, message.values.size(), sizeof(float));
}
Status check(const ScatterAddRows& message, const DeviceSpace&) {
  return check_rows(message.rows, message.values.size(), sizeof(float));
}

}  // namespace smartinf::csd
