#include "python/core/errors.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace smartinf::python {
namespace {

const char* class_of(base::ErrorCode code) {
  using base::ErrorCode;
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnsupported:
    case ErrorCode::kFailedPrecondition:
      return "UsageError";
    case ErrorCode::kMismatch:
    case ErrorCode::kAlreadyExists:
      return "MismatchError";
    case ErrorCode::kNoSpace:
      return "NoSpaceError";
    case ErrorCode::kOutOfMemory:
      return "MemoryLimitError";
    case ErrorCode::kCorrupt:
      return "CorruptError";
    case ErrorCode::kOk:
    case ErrorCode::kNotFound:
    case ErrorCode::kBusy:
    case ErrorCode::kIo:
    case ErrorCode::kCancelled:
    case ErrorCode::kTimeout:
    case ErrorCode::kPermissionDenied:
    case ErrorCode::kUnavailable:
      return "DeviceError";
  }
  return "Error";
}

}  // namespace

void register_errors() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const StatusError& error) {
      const base::Status& status = error.status();
      try {
        nb::object type = nb::module_::import_("smartinf.errors").attr(class_of(status.code()));
        nb::object instance = type(error.what());
        instance.attr("code") = std::string(base::error_code_name(status.code()));
        instance.attr("advice") = status.advice();
        instance.attr("path") = status.place().path;
        PyErr_SetObject(type.ptr(), instance.ptr());
      } catch (nb::python_error& failed) {
        failed.restore();
      }
    }
  });
}

}  // namespace smartinf::python
