// Expected failures as values: what went wrong, where (file, offset, length, errno) and what the
// user can do about it. Bugs are not reported here; they stop the program through SI_CHECK.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "smartinf/base/check.h"

namespace smartinf::base {

enum class ErrorCode : uint8_t {
  kOk = 0,
  kInvalidArgument,     // the caller's value is wrong whatever the state of the machine
  kNotFound,            // a file, device, key or name that is not there
  kAlreadyExists,       // would overwrite something that is not ours to overwrite
  kBusy,                // locked by another run
  kMismatch,            // belongs to another run, model or format
  kNoSpace,             // disk full, or more than the device can hold
  kOutOfMemory,         // more than the memory budget or a system limit allows
  kIo,                  // the operating system reported a failure of the medium
  kCorrupt,             // checksum or structure wrong: data must not be used
  kUnsupported,         // this build or machine cannot do it
  kFailedPrecondition,  // wrong order of calls or wrong state
  kCancelled,           // the user asked to stop
  kTimeout,             // no completion in the time allowed
  kPermissionDenied,    // the operating system does not let this user do it, or nobody (read-only)
  kUnavailable,         // another machine cannot be reached, or has forgotten what it was to keep
};
inline constexpr ErrorCode kErrorCodeLast = ErrorCode::kUnavailable;

/// The code's name as shown to users, e.g. "no space".
std::string_view error_code_name(ErrorCode code);

/// Where a failing transfer happened. Unset parts are left out of the message.
struct ErrorPlace {
  std::string path;
  std::optional<uint64_t> offset_bytes;
  std::optional<uint64_t> length_bytes;
  int system_errno = 0;
};

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(ErrorCode code, std::string what, std::string advice = {}, ErrorPlace place = {});

  Status(const Status& other);
  Status& operator=(const Status& other);
  Status(Status&&) noexcept = default;
  Status& operator=(Status&&) noexcept = default;
  ~Status() = default;

  bool ok() const { return detail_ == nullptr; }
  explicit operator bool() const { return ok(); }
  ErrorCode code() const { return detail_ ? detail_->code : ErrorCode::kOk; }
  /// The failure, without place or advice. Empty when ok.
  const std::string& what() const;
  const std::string& advice() const;
  const ErrorPlace& place() const;

  /// One paragraph for a person: "what: path at offset X, length Y: errno text. Advice."
  std::string to_string() const;

  /// The same failure with `context` put in front of what, e.g. the device's name. Ok stays ok.
  Status with_context(std::string_view context) &&;

 private:
  struct Detail {
    ErrorCode code;
    std::string what;
    std::string advice;
    ErrorPlace place;
  };
  std::unique_ptr<Detail> detail_;
};

/// A failed system call on a file. The code follows from errno (ENOSPC becomes kNoSpace, and so
/// on).
Status errno_status(int system_errno, std::string what, std::string path,
                    std::optional<uint64_t> offset_bytes = {},
                    std::optional<uint64_t> length_bytes = {}, std::string advice = {});

/// A value, or why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : held_(std::move(value)) {}        // NOLINT: returning a T is the point
  Result(Status status) : held_(std::move(status)) {  // NOLINT
    SI_CHECK(!std::get<Status>(held_).ok(), "a Result made from a Status must hold a failure");
  }

  bool ok() const { return std::holds_alternative<T>(held_); }
  explicit operator bool() const { return ok(); }

  Status status() const& { return ok() ? Status() : std::get<Status>(held_); }
  Status status() && { return ok() ? Status() : std::move(std::get<Status>(held_)); }

  T& value() & {
    SI_CHECK(ok(), "Result::value() without a value");
    return std::get<T>(held_);
  }
  const T& value() const& {
    SI_CHECK(ok(), "Result::value() without a value");
    return std::get<T>(held_);
  }
  T&& value() && {
    SI_CHECK(ok(), "Result::value() without a value");
    return std::get<T>(std::move(held_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> held_;
};

}  // namespace smartinf::base

#define SI_CONCAT_INNER(a, b) a##b
#define SI_CONCAT(a, b) SI_CONCAT_INNER(a, b)

/// Leaves the function with the failure, if there is one.
#define SI_RETURN_IF_ERROR(expression)                                                           \
  do {                                                                                           \
    if (::smartinf::base::Status si_status_ = (expression); !si_status_.ok()) return si_status_; \
  } while (false)

/// SI_ASSIGN_OR_RETURN(auto x, f()): x is the value of the Result, or the function is left.
#define SI_ASSIGN_OR_RETURN(target, expression) \
  SI_ASSIGN_OR_RETURN_INNER(SI_CONCAT(si_result_, __LINE__), target, expression)
#define SI_ASSIGN_OR_RETURN_INNER(result, target, expression) \
  auto result = (expression);                                 \
  if (!result.ok()) return std::move(result).status();        \
  target = std::move(result).value()
