// The safetensors format: an 8-byte little-endian header length, a JSON header that gives each
// tensor's type, shape and byte range, then the tensors' bytes. Source:
// https://huggingface.co/docs/safetensors, "Format".
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/data_file.h"
#include "smartinf/base/file_mapping.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"

namespace smartinf::model {

struct TensorInfo {
  std::string name;
  base::DataType type = base::DataType::kF32;
  std::vector<uint64_t> shape;
  uint32_t integer_bytes = 0;  // 4 or 8: integers of so many bytes, in place of `type`

  uint64_t element_bytes() const {
    return integer_bytes != 0 ? integer_bytes : base::data_type_bytes(type);
  }
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
  /// The values cast to type.
  base::Status append(base::DataType type, std::span<const float> values);
  /// Every byte must have been appended.
  base::Status finish();

 private:
  SafetensorsWriter(std::string path, int file, uint64_t bytes_left)
      : path_(std::move(path)), file_(file), bytes_left_(bytes_left) {}
  std::string partial_path() const { return path_ + ".partial"; }

  std::string path_;
  int file_ = -1;
  uint64_t bytes_left_ = 0;
  std::vector<std::byte> cast_;
};

/// The header of a safetensors file.
struct SafetensorsHeader {
  struct Entry {
    std::string type;  // "F32", "BF16", "U8"...
    std::vector<uint64_t> shape;
    uint64_t offset = 0;  // byte of the file
    uint64_t bytes = 0;
  };
  std::map<std::string, Entry> tensors;
  std::map<std::string, std::string> metadata;

  /// Takes no more memory than a few times the header, of at most 100 MB. Errors: kCorrupt with
  /// what is wrong: also for bytes that are not in the file, not as many as the shape says, of two
  /// tensors or of none, as the format has it.
  static base::Result<SafetensorsHeader> read(const base::DataFile& file);
};
/// Nothing for a type that is no number of ours.
std::optional<base::DataType> safetensors_type(const std::string& name);

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
  SafetensorsFile(base::FileMapping mapping, SafetensorsHeader header)
      : mapping_(std::move(mapping)), header_(std::move(header)) {}
  base::FileMapping mapping_;
  SafetensorsHeader header_;
};

}  // namespace smartinf::model
