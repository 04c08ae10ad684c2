// A file of tokens or weights, read piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "smartinf/base/status.h"

namespace smartinf::base {

/// Open for reading. Not mapped: a mapped file that somebody shortens ends the process (SIGBUS).
class DataFile {
 public:
  /// Errors: kNotFound, kInvalidArgument (not a regular file), kPermissionDenied, kIo.
  static Result<DataFile> open(const std::string& path);
  DataFile(DataFile&& other) noexcept;
  DataFile& operator=(DataFile&& other) noexcept;
  ~DataFile();

  const std::string& path() const { return path_; }
  /// When it was opened.
  uint64_t size() const { return size_; }
  /// Bytes [offset, offset + out.size()). Errors: kCorrupt when the file has become shorter; kIo.
  Status read(uint64_t offset, std::span<std::byte> out) const;

 private:
  DataFile(std::string path, int descriptor, uint64_t size)
      : path_(std::move(path)), descriptor_(descriptor), size_(size) {}
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

}  // namespace smartinf::base
