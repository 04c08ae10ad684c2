// Failures of the core as Python exceptions: the class follows from the code, the text is the
// core's own.
#pragma once

#include <utility>

#include "smartinf/base/status.h"

namespace smartinf::python {

/// A failure on its way to Python. Thrown by binding code only, with or without the GIL held.
class StatusError : public std::exception {
 public:
  explicit StatusError(base::Status status)
      : status_(std::move(status)), text_(status_.to_string()) {}
  const base::Status& status() const { return status_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  base::Status status_;
  std::string text_;
};

inline void check(base::Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}

template <typename T>
T take(base::Result<T> result) {
  if (!result.ok()) throw StatusError(std::move(result).status());
  return std::move(result).value();
}

/// Makes StatusError arrive as the classes of smartinf/errors.py. Called once, by the module.
void register_errors();

}  // namespace smartinf::python
