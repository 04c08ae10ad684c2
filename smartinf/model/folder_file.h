// A file of a model's folder, which somebody else may have made.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "smartinf/base/status.h"

namespace smartinf::model {

/// Its path; nothing where no such entry is. A link may lead to what is in the folder, or in the
/// Hub's cache to its blobs: what it led to otherwise would be copied and published as a part of
/// the model. Errors: kInvalidArgument for a link that leads elsewhere, kNotFound for one that
/// leads to nothing, each with the link and where it leads.
base::Result<std::optional<std::string>> find_folder_file(const std::string& folder,
                                                          std::string_view name);

}  // namespace smartinf::model
