// Arguments of the module's functions, checked.
#pragma once

#include <string>
#include <utility>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/float_formats.h"

#include "python/core/errors.h"

namespace smartinf::python {

[[noreturn]] inline void usage(std::string what, std::string advice = {}) {
  throw StatusError(
      base::Status(base::ErrorCode::kInvalidArgument, std::move(what), std::move(advice)));
}

/// An enumeration by the name that recipes use.
template <typename E>
E named(const std::string& what, const std::string& name) {
  if (const auto known = base::enum_from_name<E>(name)) return *known;
  std::string names;
  for (const std::string_view known : enum_names(E{})) {
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  usage("unknown " + what + " '" + name + "'", "Known are " + names + ".");
}

inline base::DataType data_type(const std::string& name) {
  return named<base::DataType>("data type", name);
}

}  // namespace smartinf::python
