#include "smartinf/model/folder_file.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

#include "smartinf/base/text.h"

namespace smartinf::model {

namespace fs = std::filesystem;
using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

bool is_within(const fs::path& path, const fs::path& folder) {
  const auto [end, other] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end == folder.end();
}

}  // namespace

Result<std::optional<std::string>> find_folder_file(const std::string& folder,
                                                    std::string_view name) {
  const fs::path path = fs::path(folder) / name;
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::exists(status)) return std::optional<std::string>();
  if (!fs::is_symlink(status)) return std::optional(path.string());
  const std::string to = fs::read_symlink(path, error).string();
  const auto refused = [&](ErrorCode code, std::string_view what, std::string_view advice) {
    return Status(code,
                  fmt::format("the link {} {}: {}", name, what, base::printable(to) ? to : "?"),
                  std::string(advice), base::ErrorPlace{path.string(), {}, {}, 0});
  };
  const fs::path target = fs::canonical(path, error);
  if (error) {
    return refused(ErrorCode::kNotFound, "leads to what is not there",
                   "Download the model again, or put the file there");
  }
  const fs::path here = fs::canonical(folder, error);
  const fs::path snapshots = here.parent_path();
  const bool of_cache =
      snapshots.filename() == "snapshots" && is_within(target, snapshots.parent_path() / "blobs");
  if (!error && (is_within(target, here) || of_cache)) return std::optional(path.string());
  return refused(ErrorCode::kInvalidArgument, "leads out of the model's folder",
                 "Copy the file into the folder if it belongs to the model");
}

}  // namespace smartinf::model
