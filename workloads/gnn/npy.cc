#include "workloads/gnn/npy.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

namespace smartinf::workloads {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

Status wrong(const std::string& path, ErrorCode code, std::string what, std::string advice) {
  base::ErrorPlace place;
  place.path = path;
  return Status(code, std::move(what), std::move(advice), std::move(place));
}

template <typename T>
T number_at(std::span<const std::byte> bytes, size_t at) {
  T value = 0;
  if (at + sizeof(T) <= bytes.size()) std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

/// What stands behind 'key': in the header's Python text, up to the end of the value.
std::string_view value_of(std::string_view header, std::string_view key) {
  const size_t at = header.find(key);
  if (at == std::string_view::npos) return {};
  std::string_view rest = header.substr(at + key.size());
  while (!rest.empty() && (rest[0] == ':' || rest[0] == ' ')) rest.remove_prefix(1);
  const bool is_tuple = !rest.empty() && rest[0] == '(';
  return rest.substr(0, rest.find_first_of(is_tuple ? ")" : ",}"));
}

/// Calls f(Number{}) with the type of the file's numbers; false for one that is not known.
template <typename F>
bool with_number(const std::string& type, const F& f) {
  if (type == "<f4") return f(float{}), true;
  if (type == "<f8") return f(double{}), true;
  if (type == "|u1" || type == "|b1") return f(uint8_t{}), true;
  if (type == "|i1") return f(int8_t{}), true;
  if (type == "<i4") return f(int32_t{}), true;
  if (type == "<u4") return f(uint32_t{}), true;
  if (type == "<i8") return f(int64_t{}), true;
  if (type == "<u8") return f(uint64_t{}), true;
  return false;
}

}  // namespace

uint64_t NpyFile::count() const {
  return std::accumulate(shape_.begin(), shape_.end(), uint64_t{1}, std::multiplies<>());
}

Result<NpyFile> NpyFile::open(const std::string& path) {
  SI_ASSIGN_OR_RETURN(base::DataFile file, base::DataFile::open(path));
  return at(std::make_shared<const base::DataFile>(std::move(file)), path, 0);
}

Result<NpyFile> NpyFile::at(std::shared_ptr<const base::DataFile> file, std::string path,
                            uint64_t offset) {
  const auto no_npy = [&] {
    return wrong(path, ErrorCode::kInvalidArgument, "this is no array of NumPy's",
                 "Write it with np.save, in C order.");
  };
  std::vector<std::byte> start(std::min<uint64_t>(4096, file->size() - offset));
  SI_RETURN_IF_ERROR(file->read(offset, start));
  if (start.size() < 12 || std::memcmp(start.data(), "\x93NUMPY", 6) != 0) return no_npy();
  const bool is_first = start[6] == std::byte{1};  // version
  const size_t head = is_first ? 10 : 12;
  const uint64_t length = is_first ? number_at<uint16_t>(start, 8) : number_at<uint32_t>(start, 8);
  if (head + length > start.size()) return no_npy();
  const std::string_view text(reinterpret_cast<const char*>(start.data()) + head, length);
  NpyFile npy;
  npy.type_ = value_of(text, "'descr'");
  if (npy.type_.size() < 2 || value_of(text, "'fortran_order'") != "False") return no_npy();
  npy.type_ = npy.type_.substr(1, npy.type_.size() - 2);  // without quotes
  for (std::string_view shape = value_of(text, "'shape'"); !shape.empty(); shape.remove_prefix(1)) {
    uint64_t size = 0;
    const auto [end, error] = std::from_chars(shape.data(), shape.data() + shape.size(), size);
    if (error != std::errc()) continue;
    npy.shape_.push_back(size);
    shape.remove_prefix(static_cast<size_t>(end - shape.data()) - 1);
  }
  npy.offset_ = offset + head + length;
  uint64_t bytes = 0;
  if (!with_number(npy.type_, [&](auto number) { bytes = sizeof number; })) {
    return wrong(path, ErrorCode::kUnsupported,
                 fmt::format("the array's numbers are of type {}", npy.type_),
                 "Known are float32, float64, and integers of 8, 32 and 64 bits.");
  }
  uint64_t needed = bytes;
  for (const uint64_t size : npy.shape_) {
    if (__builtin_mul_overflow(needed, size, &needed)) needed = ~uint64_t{0};
  }
  if (needed > file->size() - std::min(file->size(), npy.offset_)) {
    return wrong(path, ErrorCode::kCorrupt,
                 fmt::format("the array has {} bytes, and the file ends after {}", needed,
                             file->size() - std::min(file->size(), npy.offset_)),
                 "Write it again.");
  }
  npy.file_ = std::move(file);
  npy.path_ = std::move(path);
  return npy;
}

Result<std::map<std::string, NpyFile>> NpyFile::open_all(const std::string& path) {
  SI_ASSIGN_OR_RETURN(base::DataFile opened, base::DataFile::open(path));
  const auto file = std::make_shared<const base::DataFile>(std::move(opened));
  const auto no_npz = [&] {
    return wrong(path, ErrorCode::kInvalidArgument, "this is no file of np.savez",
                 "Write the arrays with np.savez.");
  };
  // The last record says where the list of members is; a comment may follow it.
  const uint64_t tail_bytes = std::min<uint64_t>(file->size(), 65'557);
  std::vector<std::byte> tail(tail_bytes);
  SI_RETURN_IF_ERROR(file->read(file->size() - tail_bytes, tail));
  size_t end = tail.size() < 22 ? 0 : tail.size() - 21;
  while (end > 0 && number_at<uint32_t>(tail, end - 1) != 0x06054b50) --end;
  if (end == 0) return no_npz();
  const size_t members = number_at<uint16_t>(tail, end - 1 + 10);
  const uint32_t list_bytes = number_at<uint32_t>(tail, end - 1 + 12);
  const uint32_t list_at = number_at<uint32_t>(tail, end - 1 + 16);
  if (list_at == ~uint32_t{0} || list_bytes > (uint64_t{1} << 24)) {
    return wrong(path, ErrorCode::kUnsupported, "the file is too large for an .npz",
                 "Save features as .npy and name them with --features.");
  }
  std::vector<std::byte> list(list_bytes);
  SI_RETURN_IF_ERROR(file->read(list_at, list));
  std::map<std::string, NpyFile> arrays;
  size_t at = 0;
  for (size_t i = 0; i < members; ++i) {
    if (at + 46 > list.size() || number_at<uint32_t>(list, at) != 0x02014b50) return no_npz();
    const size_t name_bytes = number_at<uint16_t>(list, at + 28);
    const size_t next = at + 46 + name_bytes + number_at<uint16_t>(list, at + 30) +
                        number_at<uint16_t>(list, at + 32);
    if (next > list.size()) return no_npz();
    std::string name(reinterpret_cast<const char*>(list.data()) + at + 46, name_bytes);
    if (number_at<uint16_t>(list, at + 10) != 0) {
      return wrong(path, ErrorCode::kUnsupported, fmt::format("{} is compressed", name),
                   "Write the arrays with np.savez, not np.savez_compressed.");
    }
    const uint64_t local = number_at<uint32_t>(list, at + 42);
    std::vector<std::byte> header(30);
    SI_RETURN_IF_ERROR(file->read(local, header));
    const uint64_t data =
        local + 30 + number_at<uint16_t>(header, 26) + number_at<uint16_t>(header, 28);
    if (data >= file->size()) return no_npz();
    if (name.ends_with(".npy")) name.resize(name.size() - 4);
    SI_ASSIGN_OR_RETURN(NpyFile array, NpyFile::at(file, path + ":" + name, data));
    arrays.emplace(std::move(name), std::move(array));
    at = next;
  }
  return arrays;
}

template <typename T>
Status NpyFile::read(uint64_t first, std::span<T> out) const {
  Status status;
  with_number(type_, [&](auto number) {
    using Number = decltype(number);
    if constexpr (std::is_floating_point_v<Number> && !std::is_floating_point_v<T>) {
      status = wrong(path_, ErrorCode::kInvalidArgument,
                     fmt::format("integers are needed, and the array is of type {}", type_),
                     "Write it as integers.");
    } else {
      constexpr size_t kSome = 1 << 16;
      std::vector<Number> some(std::min(out.size(), kSome));
      for (size_t done = 0; done < out.size() && status.ok(); done += some.size()) {
        some.resize(std::min(kSome, out.size() - done));
        status = file_->read(offset_ + (first + done) * sizeof(Number),
                             std::as_writable_bytes(std::span(some)));
        for (size_t i = 0; i < some.size() && status.ok(); ++i) {
          if constexpr (!std::is_floating_point_v<T>) {
            if (!std::in_range<T>(some[i])) {
              status = wrong(
                  path_, ErrorCode::kInvalidArgument,
                  fmt::format("value {} of the array is {}, out of the range {} to {}",
                              first + done + i, some[i], int64_t{std::numeric_limits<T>::min()},
                              std::numeric_limits<T>::max()),
                  "");
              break;
            }
          }
          out[done + i] = static_cast<T>(some[i]);
        }
      }
    }
  });
  return status;
}
template Status NpyFile::read(uint64_t, std::span<float>) const;
template Status NpyFile::read(uint64_t, std::span<int32_t>) const;
template Status NpyFile::read(uint64_t, std::span<uint8_t>) const;
template Status NpyFile::read(uint64_t, std::span<uint32_t>) const;
template Status NpyFile::read(uint64_t, std::span<uint64_t>) const;

Result<NpyWriter> NpyWriter::create(const std::string& path, const std::string& type,
                                    std::span<const uint64_t> shape) {
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': (", type);
  for (const uint64_t size : shape) header += fmt::format("{}, ", size);
  header += "), }";
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');
  header += '\n';
  const auto bytes = static_cast<uint16_t>(header.size());
  header.insert(0, std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(bytes & 255) +
                       static_cast<char>(bytes >> 8));
  const std::string partial = path + ".partial";
  const int file = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) return base::errno_status(errno, "cannot write the graph", partial);
  NpyWriter writer(path, file);
  SI_RETURN_IF_ERROR(writer.append(std::as_bytes(std::span(header))));
  return writer;
}

NpyWriter::NpyWriter(NpyWriter&& other) noexcept
    : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)) {}

NpyWriter::~NpyWriter() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink((path_ + ".partial").c_str());
}

Status NpyWriter::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = ::write(file_, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return base::errno_status(errno, "cannot write the graph", path_ + ".partial");
    bytes = bytes.subspan(static_cast<size_t>(done));
  }
  return Status();
}

Status NpyWriter::finish() {
  if (::fsync(file_) != 0 || ::rename((path_ + ".partial").c_str(), path_.c_str()) != 0) {
    return base::errno_status(errno, "cannot write the graph", path_);
  }
  ::close(std::exchange(file_, -1));
  return Status();
}

}  // namespace smartinf::workloads
