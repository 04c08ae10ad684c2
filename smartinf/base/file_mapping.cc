#include "smartinf/base/file_mapping.h"

#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/file.h"

namespace smartinf::base {

Result<FileMapping> FileMapping::open(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const int descriptor,
                      open_regular_file(path, O_RDONLY, "cannot open the file"));
  struct stat info = {};
  Status failure;
  void* memory = nullptr;
  if (::fstat(descriptor, &info) != 0) {
    failure = errno_status(errno, "cannot examine the file", path);
  } else if (info.st_size > 0) {
    memory =
        ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) failure = errno_status(errno, "cannot map the file", path);
  }
  ::close(descriptor);
  if (!failure.ok()) return failure;
  return FileMapping({static_cast<const std::byte*>(memory), static_cast<size_t>(info.st_size)});
}

FileMapping::FileMapping(FileMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

FileMapping& FileMapping::operator=(FileMapping&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

FileMapping::~FileMapping() {
  if (bytes_.data() != nullptr) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace smartinf::base
