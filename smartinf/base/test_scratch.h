// For tests: a directory that goes away with the test.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>

#include <stdlib.h>

#include "smartinf/base/check.h"

namespace smartinf::base {

class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "smartinf-XXXXXX").string();
    SI_CHECK(mkdtemp(pattern.data()) != nullptr, "no temporary directory");
    path_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace smartinf::base
