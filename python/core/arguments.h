// What the module's functions are given, checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/engine/weight_source.h"

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

/// One flat array at `address` in the order of the space. count: it holds the subgroups that begin
/// before this element, and no others are wanted; nothing: all.
inline engine::WeightsSink flat_sink(uintptr_t address, base::DataType type,
                                     std::optional<uint64_t> count) {
  auto* flat = reinterpret_cast<std::byte*>(address);
  const uint64_t end = count.value_or(~uint64_t{0});
  return [flat, type, end](uint64_t first) {
    return first < end ? flat + first * base::data_type_bytes(type) : nullptr;
  };
}

}  // namespace smartinf::python
