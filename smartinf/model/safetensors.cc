#include "smartinf/model/safetensors.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "smartinf/base/check.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/update.h"
#include "smartinf/model/placeholder.h"

namespace smartinf::model {

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

const char* type_name(const TensorInfo& tensor) {
  if (tensor.integer_bytes == 0) return type_name(tensor.type);
  return tensor.integer_bytes == 4 ? "I32" : "I64";
}

}  // namespace

uint64_t TensorInfo::bytes() const {
  uint64_t bytes = element_bytes();
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
    header[tensor.name] = {{"dtype", type_name(tensor)},
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
  std::swap(cast_, other.cast_);
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

Status SafetensorsWriter::append(base::DataType type, std::span<const float> values) {
  if (type == base::DataType::kF32) return append(std::as_bytes(values));
  cast_.resize(values.size() * base::data_type_bytes(type));
  kernels::kernels().cast_from_f32(values.data(), cast_.data(), type, values.size());
  return append(cast_);
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

namespace {

constexpr uint64_t kHeaderBytesMax = 100'000'000;  // as the format's own library has it
constexpr uint64_t kBeginBytes = 64;               // bytes that tell what is no safetensors file

/// Bytes of an element; 0: unknown.
uint64_t element_bytes(const std::string& type) {
  if (type == "F64" || type == "I64" || type == "U64") return 8;
  if (type == "F32" || type == "I32" || type == "U32") return 4;
  if (type == "F16" || type == "BF16" || type == "I16" || type == "U16") return 2;
  if (type == "I8" || type == "U8" || type == "BOOL") return 1;
  return 0;
}

/// Product of the extents; nothing where it does not fit.
std::optional<uint64_t> product(const std::vector<uint64_t>& shape) {
  uint64_t elements = 1;
  for (const uint64_t extent : shape) {
    if (__builtin_mul_overflow(elements, extent, &elements)) return std::nullopt;
  }
  return elements;
}

/// Empty, or what is wrong with it. data_offset, file_bytes: of the file.
std::string read_entry(const nlohmann::json& json, uint64_t data_offset, uint64_t file_bytes,
                       SafetensorsHeader::Entry& entry) {
  const auto unsigned_list = [](const nlohmann::json& list) {
    return list.is_array() && std::all_of(list.begin(), list.end(), [](const nlohmann::json& one) {
             return one.is_number_unsigned();
           });
  };
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string() ||
      !json.contains("shape") || !unsigned_list(json["shape"]) || !json.contains("data_offsets") ||
      !unsigned_list(json["data_offsets"]) || json["data_offsets"].size() != 2) {
    return "there is no type, shape or byte range for ";
  }
  entry.type = json["dtype"].get<std::string>();
  entry.shape = json["shape"].get<std::vector<uint64_t>>();
  const uint64_t begin = json["data_offsets"][0];
  const uint64_t end = json["data_offsets"][1];
  if (begin > end || end > file_bytes - data_offset) return "bytes are missing of ";
  entry.offset = data_offset + begin;
  entry.bytes = end - begin;
  const uint64_t each = element_bytes(entry.type);
  const std::optional<uint64_t> elements = product(entry.shape);
  uint64_t bytes = 0;
  if (each != 0 &&
      (!elements || __builtin_mul_overflow(*elements, each, &bytes) || bytes != entry.bytes)) {
    return "shape and byte range disagree of ";
  }
  return "";
}

/// Empty, or the tensor whose bytes do not begin where those of the one before it end, and how.
std::string find_gap(const SafetensorsHeader& header, uint64_t data_offset, uint64_t file_bytes) {
  using Item = std::pair<const std::string, SafetensorsHeader::Entry>;
  std::vector<const Item*> order;
  for (const Item& item : header.tensors) order.push_back(&item);
  std::ranges::sort(order, {}, [](const Item* item) {
    return std::pair(item->second.offset, item->second.bytes);
  });
  const auto shown = [](const Item* item) {
    return base::printable(item->first) ? item->first : "a tensor";
  };
  uint64_t end = data_offset;
  for (const Item* item : order) {
    if (item->second.offset > end) return "bytes of no tensor lie before " + shown(item);
    if (item->second.offset < end) return "two tensors have the same bytes: " + shown(item);
    end += item->second.bytes;
  }
  return end < file_bytes ? "bytes of no tensor lie at the end" : "";
}

}  // namespace

std::optional<base::DataType> safetensors_type(const std::string& name) {
  for (const base::DataType type :
       {base::DataType::kF32, base::DataType::kBf16, base::DataType::kF16}) {
    if (name == type_name(type)) return type;
  }
  return std::nullopt;
}

Result<SafetensorsHeader> SafetensorsHeader::read(const base::DataFile& file) {
  const auto corrupt = [&](std::string what) {
    return Status(ErrorCode::kCorrupt, "not an intact safetensors file: " + std::move(what),
                  "Remove it, or restore it from a copy", base::ErrorPlace{file.path(), {}, {}, 0});
  };
  const auto no_safetensors = [&](std::string what) -> Status {
    std::string begin(std::min<uint64_t>(file.size(), kBeginBytes), ' ');
    SI_RETURN_IF_ERROR(file.read(0, std::as_writable_bytes(std::span(begin))));
    const std::optional<Placeholder> placeholder = find_placeholder(begin);
    if (!placeholder) return corrupt(std::move(what));
    return Status(ErrorCode::kCorrupt, "the file is " + placeholder->what, placeholder->advice,
                  base::ErrorPlace{file.path(), {}, {}, 0});
  };
  uint64_t length = 0;
  if (file.size() < sizeof length) return no_safetensors("it is too short");
  SI_RETURN_IF_ERROR(file.read(0, std::as_writable_bytes(std::span(&length, 1))));
  if (length > file.size() - sizeof length) {
    return no_safetensors("the header is longer than the file");
  }
  if (length > kHeaderBytesMax) return no_safetensors("the header is longer than 100 MB");
  std::string text(length, ' ');
  SI_RETURN_IF_ERROR(file.read(sizeof length, std::as_writable_bytes(std::span(text))));
  const nlohmann::json json = base::parse_json(text);
  if (!json.is_object()) return corrupt("the header is not a JSON object");
  SafetensorsHeader header;
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadata) {
      if (!value.is_object()) return corrupt("its metadata are no object");
      for (const auto& [key, text_of] : value.items()) {
        if (!text_of.is_string()) return corrupt("its metadata are no texts");
        header.metadata[key] = text_of.get<std::string>();
      }
      continue;
    }
    const std::string wrong =
        read_entry(value, sizeof length + length, file.size(), header.tensors[name]);
    if (!wrong.empty()) {
      return corrupt(wrong + (base::printable(name) ? name : "a tensor"));
    }
  }
  const std::string gap = find_gap(header, sizeof length + length, file.size());
  if (!gap.empty()) return corrupt(gap);
  return header;
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const base::DataFile file, base::DataFile::open(path));
  SI_ASSIGN_OR_RETURN(SafetensorsHeader header, SafetensorsHeader::read(file));
  SI_ASSIGN_OR_RETURN(base::FileMapping mapping, base::FileMapping::open(path));
  if (mapping.bytes().size() < file.size()) {
    return Status(ErrorCode::kCorrupt, "the file has become shorter while it was opened", {},
                  base::ErrorPlace{path, {}, {}, 0});
  }
  return SafetensorsFile(std::move(mapping), std::move(header));
}

std::span<const std::byte> SafetensorsFile::tensor(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) return {};
  return mapping_.bytes().subspan(found->second.offset, found->second.bytes);
}

std::string SafetensorsFile::metadata(const std::string& key) const {
  const auto found = header_.metadata.find(key);
  return found == header_.metadata.end() ? std::string() : found->second;
}

}  // namespace smartinf::model
