// The table of recipe keys. Parsing, flags, --print-config, --help-recipe and docs/recipe.md are
// all made from it: a new key is one line in keys.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "smartinf/config/recipe.h"

namespace smartinf::config {

/// A byte count, written "512MiB" or as a number. ~0 is written "unlimited".
struct ByteCount {
  uint64_t* value;
};

/// An enumeration of one byte whose values are 0, 1, 2..., written by name.
struct Choice {
  uint8_t* value;
  std::span<const std::string_view> names;
};

/// A rank's number; engine::kAnyRank is written "auto".
struct RankNumber {
  uint32_t* value;
};

/// Where a key's value lives in a recipe; its alternative is the key's type.
using Field = std::variant<bool*, uint32_t*, uint64_t*, double*, std::string*,
                           std::vector<std::string>*, ByteCount, Choice, RankNumber>;

struct Key {
  std::string_view name;  // "train.steps"; of a device "device.path", whatever its number
  std::string_view help;
  /// The field in a recipe. `device` counts for keys of a device only.
  Field (*field)(Recipe& recipe, size_t device);
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

/// As messages say it: "a whole number from 0", "true or false", "one of \"a\", \"b\""...
std::string expected(const Field& field);

/// As TOML: 12, "text", ["a", "b"]...
std::string format_value(const Field& field);

/// Sets a field from a flag's text. Errors: kInvalidArgument with what was expected.
base::Status set_from_text(const Field& field, std::string_view text);

}  // namespace smartinf::config
