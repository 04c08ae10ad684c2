// A directory for a measurement that needs no drive: in memory where the system has such a place,
// gone when the measurement is over.
#pragma once

#include <filesystem>
#include <string>

#include "smartinf/base/status.h"

namespace smartinf::apps {

class ScratchDirectory {
 public:
  /// In `parent`; empty: in /dev/shm, or else where temporary files go.
  static base::Result<ScratchDirectory> make(const std::string& parent);
  ScratchDirectory(ScratchDirectory&& other) noexcept;
  ScratchDirectory& operator=(ScratchDirectory&&) = delete;
  ~ScratchDirectory();

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  explicit ScratchDirectory(std::filesystem::path path) : path_(std::move(path)) {}
  std::filesystem::path path_;  // empty: moved from
};

}  // namespace smartinf::apps
