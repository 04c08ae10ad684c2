// The table of recipe keys. Parsing, flags, --print-config, --help-recipe and docs/recipe.md are
// all made from it: a new key is one line in keys.cc.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "smartinf/base/key_table.h"
#include "smartinf/config/recipe.h"

namespace smartinf::config {

struct Key {
  std::string_view name;  // "train.steps"; of a device "device.path", whatever its number
  std::string_view help;
  /// The field in a recipe. `device` counts for keys of a device only.
  base::Field (*field)(Recipe& recipe, size_t device);
};

struct Section {
  std::string_view name;
  std::string_view help;
};

std::span<const Section> sections();
std::span<const Key> keys();

/// "device" keys repeat, one table a device.
inline constexpr std::string_view kDeviceSection = "device";

/// The part before the dot.
constexpr std::string_view section_of(std::string_view key) { return key.substr(0, key.find('.')); }
constexpr std::string_view name_of(std::string_view key) { return key.substr(key.find('.') + 1); }

/// "device.path" of device 2 is "device.2.path"; other keys stay as they are.
std::string numbered_key(std::string_view key, size_t device);

}  // namespace smartinf::config
