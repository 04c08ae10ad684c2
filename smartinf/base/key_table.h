// Files of keys: recipes, machine files, serve.toml. Each of them has a table of its keys, and what
// is wrong is said in the same words for all. toml++ is included here alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/status.h"

namespace smartinf::base {

/// A byte count, written "512MiB" or as a number. ~0 is written "unlimited".
struct ByteCount {
  uint64_t* value;
};

/// An enumeration of one byte whose values are 0, 1, 2..., written by name.
struct NameOf {
  uint8_t* value;
  std::span<const std::string_view> names;
};
/// names: all of the enumeration's or its first ones.
template <typename E>
NameOf by_name(E& value, std::span<const std::string_view> names = enum_names(E{})) {
  static_assert(std::is_same_v<std::underlying_type_t<E>, uint8_t>);
  return {reinterpret_cast<uint8_t*>(&value), names};
}

/// A whole number of which one value or two are written as words.
struct NumberOrWord {
  uint32_t* value;
  uint32_t value_of_word;
  std::string_view word;
  std::string_view noun;  // "the number of a rank"
  uint32_t value_of_other = 0;
  std::string_view other = {};  // empty: there is one word
};

/// A number in bounds. It may be written as a size, "64GB".
struct Number {
  std::variant<uint32_t*, uint64_t*, double*> value;
  double least;
  double most;
  std::string_view words;  // behind "a number": "above zero"
};

/// Where a key's value goes; its alternative is the key's type.
using Field = std::variant<bool*, uint32_t*, uint64_t*, double*, std::string*,
                           std::vector<std::string>*, ByteCount, NameOf, NumberOrWord, Number>;

/// As messages say it: "a whole number from 0", "true or false", "one of \"a\", \"b\""...
std::string expected(const Field& field);
/// As TOML: 12, "text", ["a", "b"]...
std::string format_value(const Field& field);
/// Sets a field from a flag's text. Errors: kInvalidArgument with what was expected.
Status set_from_text(const Field& field, std::string_view text);
/// Whether a number keeps its bounds.
bool in_bounds(const Number& number, double value);

struct NamedField {
  std::string_view name;
  Field field;
  std::string_view help = {};
};

struct TomlPlace {
  uint32_t line = 0;
  uint32_t column = 0;
};

struct TomlValue {
  /// Nothing for what no field takes: a date, a table, a list of other things than texts.
  std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<std::string>> value;
  std::string found;  // as messages say it: "the whole number 12"
  TomlPlace at;
};

struct TomlTable {
  struct Key {
    std::string name;
    TomlPlace at;
    TomlValue value;
  };
  TomlPlace at;
  std::vector<Key> keys;
};

/// An entry at the top of a file.
struct TomlEntry {
  enum class Kind : uint8_t { kValue, kTable, kTables };
  std::string name;
  TomlPlace at;
  Kind kind = Kind::kValue;
  TomlValue value;
  std::vector<TomlTable> tables;  // one, or those of a list of them
};

/// Whether the value fits the field and was put there.
bool set_from_value(const Field& field, const TomlValue& value);

/// One line of bounded length of a user's text.
std::string excerpt(std::string_view text);

/// Reads a file and collects what is wrong with it, each with its place.
class KeyReader {
 public:
  explicit KeyReader(std::string path) : path_(std::move(path)) {}

  /// Entries at the top of the text, in order; nothing where it is no TOML, which is a problem.
  std::vector<TomlEntry> parse(std::string_view text);
  void problem(const TomlPlace& at, std::string_view text);
  void problem(std::string text);
  bool ok() const { return problems_.empty(); }
  /// Ok, or kInvalidArgument with all problems, a line each, up to ten of them.
  Status status(std::string advice = {}) const;

  /// The keys of a table into the fields of their names. section: in front of names; empty: none.
  void read(std::string_view section, const TomlTable& table, std::span<const NamedField> fields);
  /// As read() for one key; false: there is no such field, which is a problem as well.
  bool read(std::string_view section, const TomlTable::Key& key,
            std::span<const NamedField> fields);
  /// The entry's tables; a problem where it is not a list of at most so many.
  std::span<const TomlTable> list_of(const TomlEntry& entry, size_t most);

 private:
  std::string path_;
  std::vector<std::string> problems_;
  size_t left_out_ = 0;
};

/// "; did you mean X?", or all names where none is near.
std::string did_you_mean(std::string_view name, std::span<const std::string_view> names);

}  // namespace smartinf::base
