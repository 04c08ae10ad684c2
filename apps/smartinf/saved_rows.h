// Rows of tables in a device's directory, as the commands for states show them.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/storage/row_file.h"

namespace smartinf::apps {

/// Tables that a file there was made for; none: there is no file. Of a device of another machine
/// none is shown. Errors: what is there cannot be read.
base::Result<std::optional<storage::RowFileLayout>> saved_tables(const std::string& device);

/// The file as the state beside it has committed `step`, to be read; null: the state has no tables.
/// Nobody has the device open. Errors: RowFile::open's; kNotFound, the file is missing.
base::Result<std::unique_ptr<storage::RowFile>> open_saved_rows(const std::string& device,
                                                                base::StepNumber step);

/// "ngram (state): 1000 rows here of 772 B".
std::string table_text(const storage::RowTableLayout& table);

}  // namespace smartinf::apps
