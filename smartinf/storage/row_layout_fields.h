// The members of tables' layouts, in the order in which they stand in a file (row_format.h) and are
// sent to another machine.
#pragma once

#include "smartinf/base/choice.h"
#include "smartinf/storage/row_layout.h"

namespace smartinf::storage {

template <typename Wire>
void describe(Wire& wire, RowTableLayout& table) {
  auto& [name, kind, record_bytes, rows] = table;
  wire(name, base::choice(kind, RowTableKind::kScratch), record_bytes, rows);
}
template <typename Wire>
void describe(Wire& wire, RowFileLayout& layout) {
  auto& [run, device_index, device_count, log_bytes, tables, description] = layout;
  wire(run.bytes, device_index, device_count, log_bytes, tables, description);
}

}  // namespace smartinf::storage
