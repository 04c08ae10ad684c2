#include "smartinf/model/placeholder.h"

#include <array>

namespace smartinf::model {

std::optional<Placeholder> find_placeholder(std::string_view begin) {
  if (begin.starts_with("version https://git-lfs.github.com/spec/")) {
    return Placeholder{"a Git LFS pointer, not the file itself",
                       "Get the file: git lfs install, then git lfs pull in the folder"};
  }
  constexpr std::array<std::string_view, 7> kAnswers{
      "Entry not found",      "404: Not Found", "Not Found", "Invalid username or password",
      "Repository not found", "{\"error\"",     "<"};
  for (const std::string_view answer : kAnswers) {
    if (!begin.starts_with(answer)) continue;
    return Placeholder{"a server's answer, not the file itself",
                       "Download the file again; the server had no such file, or wanted a login"};
  }
  return std::nullopt;
}

}  // namespace smartinf::model
