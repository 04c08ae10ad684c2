// Where what torch throws becomes a Status.
#pragma once

#include <exception>
#include <new>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "smartinf/base/status.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

inline constexpr const char* kLessTraining =
    "Make train.micro_batch or data.sequence smaller, or set memory.activations = \"recompute\"";

/// Runs `body`, which returns a Status or Result, and makes a Status of what torch throws. advice:
/// where memory ends.
template <typename Body>
auto guarded(const char* doing, Body body, const char* advice = kLessTraining) -> decltype(body()) {
  using base::ErrorCode;
  try {
    return body();
  } catch (const StatusError& error) {
    return error.status;
  } catch (const std::bad_alloc&) {
    return base::Status(ErrorCode::kOutOfMemory, fmt::format("{}: out of memory", doing), advice);
  } catch (const c10::OutOfMemoryError& error) {
    return base::Status(ErrorCode::kOutOfMemory,
                        fmt::format("{}: {}", doing, error.what_without_backtrace()), advice);
  } catch (const c10::Error& error) {
    return base::Status(ErrorCode::kFailedPrecondition,
                        fmt::format("{}: {}", doing, error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return base::Status(ErrorCode::kFailedPrecondition, fmt::format("{}: {}", doing, error.what()));
  }
}

}  // namespace smartinf::train
