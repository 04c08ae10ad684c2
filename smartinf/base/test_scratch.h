// For tests: a directory that goes away with the test, in SMARTINF_TEST_FOLDER or else where
// temporary files are.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include <stdlib.h>

#include "smartinf/base/check.h"

namespace smartinf::base {

class Scratch {
 public:
  Scratch() {
    const char* chosen = std::getenv("SMARTINF_TEST_FOLDER");
    const std::filesystem::path folder =
        chosen != nullptr ? chosen : std::filesystem::temp_directory_path();
    std::string pattern = (folder / "smartinf-XXXXXX").string();
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
