// A failure where torch's code lies between who finds it and who returns it.
#pragma once

#include <exception>
#include <stop_token>
#include <utility>

#include "smartinf/base/status.h"

namespace smartinf::train {

struct StatusError : std::exception {
  explicit StatusError(base::Status failure) : status(std::move(failure)) {}
  const char* what() const noexcept override { return "see status"; }
  base::Status status;
};

inline void throw_if_error(base::Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}

inline void throw_if_stopped(const std::stop_token& stop) {
  if (stop.stop_requested()) throw StatusError({base::ErrorCode::kCancelled, "stopped"});
}

}  // namespace smartinf::train
