// Small texts that lie where a model's file should: what a download leaves when it has failed, or
// has not been finished.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace smartinf::model {

struct Placeholder {
  std::string what;  // "a Git LFS pointer, not the file itself"
  std::string advice;
};
/// begin: the file's first bytes; some hundred are enough.
std::optional<Placeholder> find_placeholder(std::string_view begin);

}  // namespace smartinf::model
