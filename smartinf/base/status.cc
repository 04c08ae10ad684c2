#include "smartinf/base/status.h"

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

namespace smartinf::base {
namespace {

const std::string kEmpty;
const ErrorPlace kNowhere;

ErrorCode code_of_errno(int system_errno) {
  switch (system_errno) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return ErrorCode::kNoSpace;
    case ENOENT:
    case ENOTDIR:
    case ENODEV:
    case ENXIO:
      return ErrorCode::kNotFound;
    case EEXIST:
      return ErrorCode::kAlreadyExists;
    case EBUSY:
    case EWOULDBLOCK:
    case ETXTBSY:
      return ErrorCode::kBusy;
    case ENOMEM:
      return ErrorCode::kOutOfMemory;
    case EOPNOTSUPP:
    case ENOSYS:
      return ErrorCode::kUnsupported;
    case EISDIR:
      return ErrorCode::kInvalidArgument;
    case EACCES:
    case EPERM:
    case EROFS:
      return ErrorCode::kPermissionDenied;
    case ETIMEDOUT:
      return ErrorCode::kTimeout;
    default:
      return ErrorCode::kIo;
  }
}

/// Bytes of each part of an error that are shown, at most.
constexpr size_t kShownBytesMax = 4096;

/// Names in it may come from a file or a server that is somebody else's: a terminal must not obey
/// them, nor show pages of them.
std::string shown_text(std::string_view text) {
  std::string shown;
  for (const char c : text.substr(0, kShownBytesMax)) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\n') || byte == 0x7f) {
      shown += fmt::format("\\x{:02x}", byte);
    } else {
      shown += c;
    }
  }
  if (text.size() > kShownBytesMax) {
    shown += fmt::format("... ({} bytes more)", text.size() - kShownBytesMax);
  }
  return shown;
}

}  // namespace

std::string_view error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return "ok";
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kNotFound:
      return "not found";
    case ErrorCode::kAlreadyExists:
      return "already exists";
    case ErrorCode::kBusy:
      return "busy";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kNoSpace:
      return "no space";
    case ErrorCode::kOutOfMemory:
      return "out of memory";
    case ErrorCode::kIo:
      return "I/O error";
    case ErrorCode::kCorrupt:
      return "corrupt";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kFailedPrecondition:
      return "failed precondition";
    case ErrorCode::kCancelled:
      return "cancelled";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kPermissionDenied:
      return "permission denied";
    case ErrorCode::kUnavailable:
      return "unavailable";
  }
  return "unknown";
}

Status::Status(ErrorCode code, std::string what, std::string advice, ErrorPlace place)
    : detail_(std::make_unique<Detail>(
          Detail{code, std::move(what), std::move(advice), std::move(place)})) {
  SI_CHECK(code != ErrorCode::kOk, "a failure needs a code other than kOk");
}

Status::Status(const Status& other)
    : detail_(other.detail_ ? std::make_unique<Detail>(*other.detail_) : nullptr) {}

Status& Status::operator=(const Status& other) {
  if (this != &other) detail_ = other.detail_ ? std::make_unique<Detail>(*other.detail_) : nullptr;
  return *this;
}

const std::string& Status::what() const { return detail_ ? detail_->what : kEmpty; }
const std::string& Status::advice() const { return detail_ ? detail_->advice : kEmpty; }
const ErrorPlace& Status::place() const { return detail_ ? detail_->place : kNowhere; }

std::string Status::to_string() const {
  if (ok()) return "ok";
  std::string text = shown_text(detail_->what);
  const ErrorPlace& place = detail_->place;
  if (!place.path.empty()) text += fmt::format(": {}", shown_text(place.path));
  if (place.offset_bytes) text += fmt::format(" at offset {}", *place.offset_bytes);
  if (place.length_bytes) text += fmt::format(", length {}", *place.length_bytes);
  if (place.system_errno != 0) text += fmt::format(": {}", std::strerror(place.system_errno));
  if (place.system_errno == EFBIG) text += " (the limit of file sizes: ulimit -f)";
  if (!detail_->advice.empty()) {
    if (text.back() != '.') text += '.';
    text += ' ';
    text += shown_text(detail_->advice);
  }
  return text;
}

Status Status::with_context(std::string_view context) && {
  if (detail_) detail_->what = fmt::format("{}: {}", context, detail_->what);
  return std::move(*this);
}

Status errno_status(int system_errno, std::string what, std::string path,
                    std::optional<uint64_t> offset_bytes, std::optional<uint64_t> length_bytes,
                    std::string advice) {
  if (system_errno == EMFILE || system_errno == ENFILE) {
    advice = "Raise the limit of open files (ulimit -n, the system's fs.file-max).";
  }
  return Status(code_of_errno(system_errno), std::move(what), std::move(advice),
                ErrorPlace{std::move(path), offset_bytes, length_bytes, system_errno});
}

}  // namespace smartinf::base
