#include "apps/smartinf/saved_rows.h"

#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/serve/options.h"
#include "smartinf/storage/row_commit.h"
#include "smartinf/storage/state_reader.h"

namespace smartinf::apps {

using base::ErrorCode;
using base::Result;
using base::Status;

Result<std::optional<storage::RowFileLayout>> saved_tables(const std::string& device) {
  std::optional<storage::RowFileLayout> tables;
  if (serve::is_remote(device)) return tables;
  auto place = storage::open_cache_to_read(device, storage::kRowFileName);
  if (place.status().code() == ErrorCode::kNotFound) return tables;
  if (!place.ok()) return std::move(place).status();
  SI_ASSIGN_OR_RETURN(tables, storage::RowFile::peek(std::move(*place)));
  return tables;
}

Result<std::unique_ptr<storage::RowFile>> open_saved_rows(const std::string& device,
                                                          base::StepNumber step) {
  static base::TrafficCounter ignored;
  if (serve::is_remote(device)) return std::unique_ptr<storage::RowFile>();
  SI_ASSIGN_OR_RETURN(const auto state,
                      storage::StateReader::open(device, storage::ReaderLock::kLeave));
  SI_RETURN_IF_ERROR(state->choose_step(step));
  const std::string record = storage::split_row_commit(state->client_metadata()).record;
  if (record.empty()) return std::unique_ptr<storage::RowFile>();
  return storage::open_rows_to_read(device, state->layout().run, record, ignored);
}

std::string table_text(const storage::RowTableLayout& table) {
  return fmt::format("{} ({}): {} rows here of {}", table.name,
                     storage::kRowTableKindNames[static_cast<size_t>(table.kind)], table.rows,
                     base::format_bytes(table.record_bytes));
}

}  // namespace smartinf::apps
