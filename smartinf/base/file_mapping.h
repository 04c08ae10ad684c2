// A file seen as memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "smartinf/base/status.h"

namespace smartinf::base {

/// A file's bytes, read-only, unmapped on destruction.
class FileMapping {
 public:
  /// Errors: kNotFound, kIo; an empty file maps to nothing.
  static Result<FileMapping> open(const std::string& path);
  FileMapping(FileMapping&& other) noexcept;
  FileMapping& operator=(FileMapping&& other) noexcept;
  ~FileMapping();
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit FileMapping(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

}  // namespace smartinf::base
