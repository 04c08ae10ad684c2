#include "smartinf/base/data_file.h"

#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/file.h"

namespace smartinf::base {

Result<DataFile> DataFile::open(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const int descriptor,
                      open_regular_file(path, O_RDONLY, "cannot open the file"));
  DataFile file(path, descriptor, 0);
  struct stat info {};
  if (::fstat(descriptor, &info) != 0) {
    return errno_status(errno, "cannot examine the file", path);
  }
  file.size_ = static_cast<uint64_t>(info.st_size);
  return file;
}

DataFile::DataFile(DataFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}

DataFile& DataFile::operator=(DataFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  return *this;
}

DataFile::~DataFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Status DataFile::read(uint64_t offset, std::span<std::byte> out) const {
  const uint64_t length = out.size();
  for (uint64_t at = offset; !out.empty();) {
    const ssize_t got = ::pread(descriptor_, out.data(), out.size(), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status(errno, "cannot read the file", path_, at, length);
    if (got == 0) {
      return Status(
          ErrorCode::kCorrupt,
          fmt::format("the file had {} bytes when it was opened and has become shorter", size_),
          "Restore the file as it was, then start again", ErrorPlace{path_, at, length, 0});
    }
    at += static_cast<uint64_t>(got);
    out = out.subspan(static_cast<size_t>(got));
  }
  return Status();
}

}  // namespace smartinf::base
