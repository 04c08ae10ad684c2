// The safetensors format: an 8-byte little-endian header length, a JSON header that gives each
// tensor's type, shape and byte range, then the tensors' bytes. Written as a stream, read by
// mapping. Source: https://huggingface.co/docs/safetensors, "Format".
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/train/file_mapping.h"

namespace smartinf::train {

struct TensorInfo {
  std::string name;
  base::DataType type = base::DataType::kF32;
  std::vector<uint64_t> shape;

  uint64_t bytes() const;
};

/// Writes tensors in the order in which they are named, in pieces of any size. The file has its
/// name only once finish() has succeeded; without it nothing is left. Threads: one caller.
class SafetensorsWriter {
 public:
  /// Errors: kIo, kNoSpace with the path.
  static base::Result<SafetensorsWriter> create(const std::string& path,
                                                std::span<const TensorInfo> tensors,
                                                const std::map<std::string, std::string>& metadata);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&& other) noexcept;
  ~SafetensorsWriter();

  base::Status append(std::span<const std::byte> bytes);
  /// Every byte must have been appended.
  base::Status finish();

 private:
  SafetensorsWriter(std::string path, int file, uint64_t bytes_left)
      : path_(std::move(path)), file_(file), bytes_left_(bytes_left) {}
  std::string partial_path() const { return path_ + ".partial"; }

  std::string path_;
  int file_ = -1;
  uint64_t bytes_left_ = 0;
};

/// A safetensors file, mapped.
class SafetensorsFile {
 public:
  /// Errors: kNotFound, kCorrupt with what is wrong.
  static base::Result<SafetensorsFile> open(const std::string& path);

  /// Empty when the file has no such tensor.
  std::span<const std::byte> tensor(const std::string& name) const;
  /// Empty when the header has no such entry.
  std::string metadata(const std::string& key) const;

 private:
  explicit SafetensorsFile(FileMapping mapping) : mapping_(std::move(mapping)) {}
  FileMapping mapping_;
  std::map<std::string, std::span<const std::byte>> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace smartinf::train
