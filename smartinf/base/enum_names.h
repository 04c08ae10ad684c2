// The names of enumerations that users meet: in recipes, flags, JSON, Python and messages. Each
// enumeration has one table, beside it:
//
//   enum class Durability : uint8_t { kStep, kNone };
//   inline constexpr std::array<std::string_view, 2> kDurabilityNames{"step", "none"};
//   constexpr EnumNames enum_names(Durability) { return kDurabilityNames; }
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace smartinf::base {

/// In the order of the values, which are 0, 1, 2...
using EnumNames = std::span<const std::string_view>;

/// "?" for a value that the table has not.
template <typename E>
constexpr std::string_view enum_name(E value) {
  const EnumNames names = enum_names(value);
  const auto index = static_cast<size_t>(value);
  return index < names.size() ? names[index] : "?";
}

template <typename E>
constexpr std::optional<E> enum_from_name(std::string_view name) {
  const EnumNames names = enum_names(E{});
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return std::nullopt;
  return static_cast<E>(found - names.begin());
}

/// For whoever lists them.
inline std::vector<std::string> name_list(EnumNames names) { return {names.begin(), names.end()}; }
template <typename E>
std::vector<std::string> enum_name_list() {
  return name_list(enum_names(E{}));
}

}  // namespace smartinf::base
