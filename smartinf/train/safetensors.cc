#include "smartinf/train/safetensors.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "smartinf/base/check.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

constexpr const char* kMetadata = "__metadata__";

const char* type_name(base::DataType type) {
  switch (type) {
    case base::DataType::kF32:
      return "F32";
    case base::DataType::kBf16:
      return "BF16";
    case base::DataType::kF16:
      return "F16";
  }
  return "?";
}

}  // namespace

uint64_t TensorInfo::bytes() const {
  uint64_t bytes = base::data_type_bytes(type);
  for (const uint64_t extent : shape) bytes *= extent;
  return bytes;
}

Result<SafetensorsWriter> SafetensorsWriter::create(
    const std::string& path, std::span<const TensorInfo> tensors,
    const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header;
  if (!metadata.empty()) header[kMetadata] = metadata;
  uint64_t offset = 0;
  for (const TensorInfo& tensor : tensors) {
    header[tensor.name] = {{"dtype", type_name(tensor.type)},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.bytes()}}};
    offset += tensor.bytes();
  }
  std::string text = header.dump();
  text.resize(base::round_up(text.size(), 8), ' ');  // so that the tensors are aligned
  const uint64_t length = text.size();

  const std::string partial = path + ".partial";
  const int file = ::open(partial.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  if (file < 0) return base::errno_status(errno, "cannot make the file", partial);
  SafetensorsWriter writer(path, file, sizeof length + length + offset);
  SI_RETURN_IF_ERROR(writer.append(std::as_bytes(std::span(&length, 1))));
  SI_RETURN_IF_ERROR(writer.append(std::as_bytes(std::span(text))));
  return writer;
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      bytes_left_(other.bytes_left_) {}

SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(file_, other.file_);
  std::swap(bytes_left_, other.bytes_left_);
  return *this;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(partial_path().c_str());
}

Status SafetensorsWriter::append(std::span<const std::byte> bytes) {
  SI_CHECK(bytes.size() <= bytes_left_, "more bytes than the header promises");
  bytes_left_ -= bytes.size();
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      return base::errno_status(errno, "cannot write", partial_path(), {}, bytes.size());
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return Status();
}

Status SafetensorsWriter::finish() {
  SI_CHECK(bytes_left_ == 0, "fewer bytes than the header promises");
  if (::fsync(file_) != 0) return base::errno_status(errno, "cannot sync", partial_path());
  ::close(std::exchange(file_, -1));
  if (::rename(partial_path().c_str(), path_.c_str()) != 0) {
    return base::errno_status(errno, "cannot rename to", path_);
  }
  return Status();
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  SI_ASSIGN_OR_RETURN(FileMapping mapping, FileMapping::open(path));
  SafetensorsFile file(std::move(mapping));
  const std::span<const std::byte> bytes = file.mapping_.bytes();
  const auto corrupt = [&](std::string what) {
    base::ErrorPlace place;
    place.path = path;
    return Status(ErrorCode::kCorrupt, "not an intact safetensors file: " + std::move(what),
                  "Remove it, or restore it from a copy", place);
  };
  uint64_t length = 0;
  if (bytes.size() < sizeof length) return corrupt("it is too short");
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > bytes.size() - sizeof length) return corrupt("the header is longer than the file");
  const nlohmann::json header = base::parse_json(
      std::string_view(reinterpret_cast<const char*>(bytes.data()) + sizeof length, length));
  if (!header.is_object()) return corrupt("the header is not a JSON object");
  const std::span<const std::byte> data = bytes.subspan(sizeof length + length);
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadata) {
      for (const auto& [key, value] : entry.items()) {
        if (value.is_string()) file.metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    const auto offsets = entry.is_object() ? entry.find("data_offsets") : entry.end();
    if (!entry.is_object() || offsets == entry.end() || !offsets->is_array() ||
        offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() ||
        !(*offsets)[1].is_number_unsigned()) {
      return corrupt("there is no byte range for " + name);
    }
    const uint64_t begin = (*offsets)[0];
    const uint64_t end = (*offsets)[1];
    if (begin > end || end > data.size()) return corrupt("bytes of " + name + " are missing");
    file.tensors_[name] = data.subspan(begin, end - begin);
  }
  return file;
}

std::span<const std::byte> SafetensorsFile::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? std::span<const std::byte>() : found->second;
}

std::string SafetensorsFile::metadata(const std::string& key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? std::string() : found->second;
}

}  // namespace smartinf::train
