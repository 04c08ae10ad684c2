#include "smartinf/base/file.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/units.h"

namespace smartinf::base {
namespace {

const char* kind_text(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device node";
}

/// Closes on the way out.
class Closing {
 public:
  explicit Closing(int descriptor) : descriptor_(descriptor) {}
  ~Closing() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Closing(const Closing&) = delete;
  Closing& operator=(const Closing&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

Status write_all(int descriptor, std::string_view text, std::string_view what,
                 const std::string& path) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno_status(errno, std::string(what), path);
    text.remove_prefix(static_cast<size_t>(written));
  }
  return Status();
}

}  // namespace

Result<int> open_regular_file(const std::string& path, int flags, std::string_view what) {
  // O_NONBLOCK: opening a FIFO would wait for somebody at its other end.
  const int descriptor = ::open(path.c_str(), flags | O_NONBLOCK | O_CLOEXEC, 0666);
  const int why = errno;
  struct stat info {};
  if (descriptor < 0 && why == ENXIO && ::stat(path.c_str(), &info) == 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the path is {}", what, kind_text(info.st_mode)),
                  "There must be a regular file at this path.", ErrorPlace{path, {}, {}, 0});
  }
  if (descriptor < 0) return errno_status(why, std::string(what), path);
  if (::fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(descriptor);
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the path is {}", what, kind_text(info.st_mode)),
                  "There must be a regular file at this path.", ErrorPlace{path, {}, {}, 0});
  }
  const int set = ::fcntl(descriptor, F_GETFL);
  if (set >= 0) (void)::fcntl(descriptor, F_SETFL, set & ~O_NONBLOCK);
  return descriptor;
}

Result<std::string> read_text_file(const std::string& path, std::string_view what,
                                   uint64_t bytes_max) {
  SI_ASSIGN_OR_RETURN(const int opened, open_regular_file(path, O_RDONLY, what));
  const Closing file(opened);
  std::string text;
  std::string piece(64 * kKiB, '\0');
  while (true) {
    const ssize_t got = ::read(file.get(), piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status(errno, std::string(what), path);
    if (got == 0) return text;
    text.append(piece, 0, static_cast<size_t>(got));
    if (text.size() > bytes_max) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("{}: it is longer than {}", what, format_bytes(bytes_max)), {},
                    ErrorPlace{path, {}, {}, 0});
    }
  }
}

Status write_text_file(const std::string& path, std::string_view text, std::string_view what,
                       uint32_t mode) {
  // A name of its own: nobody else's file and no link can stand there (O_EXCL).
  const std::string partial = fmt::format("{}.{}.partial", path, ::getpid());
  (void)::unlink(partial.c_str());  // of a process that had this number and died
  const Closing file(
      ::open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
  if (file.get() < 0) return errno_status(errno, std::string(what), partial);
  Status status = write_all(file.get(), text, what, partial);
  if (status.ok() && ::fsync(file.get()) != 0) {
    status = errno_status(errno, std::string(what), partial);
  }
  if (status.ok() && ::rename(partial.c_str(), path.c_str()) != 0) {
    status = errno_status(errno, std::string(what), path);
  }
  if (!status.ok()) {
    (void)::unlink(partial.c_str());
    return status;
  }
  std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  const Closing directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0 || ::fsync(directory.get()) != 0) {
    return errno_status(errno, std::string(what), folder.string());
  }
  return Status();
}

}  // namespace smartinf::base
