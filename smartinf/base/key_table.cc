#include "smartinf/base/key_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/nearest.h"
#include "smartinf/base/units.h"

#define TOML_HEADER_ONLY 1
#define TOML_EXCEPTIONS 0
#include "smartinf/base/toml.h"

namespace smartinf::base {
namespace {

template <typename... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
// clang 14 does not deduce the arguments of an aggregate by itself.
template <typename... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\r':
        out += "\\r";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          out += fmt::format("\\u{:04X}", static_cast<unsigned char>(c));
        } else {
          out += c;
        }
    }
  }
  return out + '"';
}

// "64 MiB" where that is exact, else the plain number.
std::string format_exact_bytes(uint64_t bytes) {
  if (bytes == ~uint64_t{0}) return "\"unlimited\"";
  for (const auto& [unit, name] :
       {std::pair{kGiB, "GiB"}, std::pair{kMiB, "MiB"}, std::pair{kKiB, "KiB"}}) {
    if (bytes != 0 && bytes % unit == 0) return fmt::format("\"{}{}\"", bytes / unit, name);
  }
  return fmt::format("{}", bytes);
}

std::string format_real(double value) {
  std::string text = fmt::format("{}", value);
  // TOML wants a point or an exponent in a real number.
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

Status refuse(const Field& field, std::string_view text) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("expected {}, found '{}'", expected(field), text));
}

template <typename T>
Status set_whole(const Field& field, T* out, std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return refuse(field, text);
  // A recipe file can hold no more; so every value can be printed and read again.
  if (uint64_t{value} > static_cast<uint64_t>(INT64_MAX)) return refuse(field, text);
  *out = value;
  return Status();
}

bool set_number(const Number& out, double value) {
  if (!in_bounds(out, value)) return false;
  std::visit([&](auto* to) { *to = static_cast<std::remove_pointer_t<decltype(to)>>(value); },
             out.value);
  return true;
}

std::string found(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::string:
      return fmt::format("the text \"{}\"", excerpt(**node.as_string()));
    case toml::node_type::integer:
      return fmt::format("the whole number {}", **node.as_integer());
    case toml::node_type::floating_point:
      return fmt::format("the number {}", **node.as_floating_point());
    case toml::node_type::boolean:
      return **node.as_boolean() ? "true" : "false";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::table:
      return "a table";
    default:
      return "a date or time";
  }
}

TomlPlace place_of(const toml::source_region& where) {
  return {where.begin.line, where.begin.column};
}

TomlValue value_of(const toml::node& node) {
  TomlValue out{{}, found(node), place_of(node.source())};
  if (const auto* flag = node.as_boolean()) out.value = **flag;
  if (const auto* whole = node.as_integer()) out.value = **whole;
  if (const auto* real = node.as_floating_point()) out.value = **real;
  if (const auto* text = node.as_string()) out.value = **text;
  const toml::array* list = node.as_array();
  if (list == nullptr || !std::ranges::all_of(*list, &toml::node::is_string)) return out;
  std::vector<std::string>& texts = out.value.emplace<std::vector<std::string>>();
  for (const toml::node& text : *list) texts.push_back(**text.as_string());
  return out;
}

TomlTable table_of(const toml::table& table) {
  TomlTable out{place_of(table.source()), {}};
  for (const auto& [name, node] : table) {
    out.keys.push_back({std::string(name.str()), place_of(name.source()), value_of(node)});
  }
  return out;
}

}  // namespace

std::string expected(const Field& field) {
  return std::visit(
      Overloaded{[](bool*) -> std::string { return "true or false"; },
                 [](uint32_t*) { return fmt::format("a whole number from 0 to {}", UINT32_MAX); },
                 [](uint64_t*) -> std::string { return "a whole number from 0"; },
                 [](double*) -> std::string { return "a number"; },
                 [](std::string*) -> std::string { return "a text"; },
                 [](std::vector<std::string>*) -> std::string { return "a list of texts"; },
                 [](ByteCount bytes) -> std::string {
                   return *bytes.value == ~uint64_t{0} ? "a size like \"512MiB\", or \"unlimited\""
                                                       : "a size like \"512MiB\"";
                 },
                 [](const NumberOrWord& number) {
                   return fmt::format("{}, or \"{}\"{}", number.noun, number.word,
                                      number.other.empty() ? "" : " or " + quote(number.other));
                 },
                 [](const NameOf& name) {
                   return fmt::format("one of \"{}\"", fmt::join(name.names, "\", \""));
                 },
                 [](const Number& number) {
                   const bool whole = !std::holds_alternative<double*>(number.value);
                   return fmt::format("a {}number {}", whole ? "whole " : "", number.words);
                 }},
      field);
}

std::string format_value(const Field& field) {
  return std::visit(
      Overloaded{[](const bool* value) -> std::string { return *value ? "true" : "false"; },
                 [](const uint32_t* value) { return fmt::format("{}", *value); },
                 [](const uint64_t* value) { return fmt::format("{}", *value); },
                 [](const double* value) { return format_real(*value); },
                 [](const std::string* value) { return quote(*value); },
                 [](const std::vector<std::string>* value) {
                   std::string out = "[";
                   for (const std::string& text : *value) {
                     if (out.size() > 1) out += ", ";
                     out += quote(text);
                   }
                   return out + "]";
                 },
                 [](ByteCount bytes) { return format_exact_bytes(*bytes.value); },
                 [](const NumberOrWord& number) {
                   if (*number.value == number.value_of_word) return quote(number.word);
                   return !number.other.empty() && *number.value == number.value_of_other
                              ? quote(number.other)
                              : fmt::format("{}", *number.value);
                 },
                 [](const NameOf& name) { return quote(name.names[*name.value]); },
                 [](const Number& number) {
                   return std::visit([](auto* value) { return format_value(value); }, number.value);
                 }},
      field);
}

Status set_from_text(const Field& field, std::string_view text) {
  return std::visit(
      Overloaded{[&](bool* out) {
                   if (text != "true" && text != "false") return refuse(field, text);
                   *out = text == "true";
                   return Status();
                 },
                 [&](uint32_t* out) { return set_whole(field, out, text); },
                 [&](uint64_t* out) { return set_whole(field, out, text); },
                 [&](double* out) {
                   double value = 0;
                   const char* last = text.data() + text.size();
                   const auto [end, error] = std::from_chars(text.data(), last, value);
                   if (error != std::errc() || end != last || !std::isfinite(value)) {
                     return refuse(field, text);
                   }
                   *out = value;
                   return Status();
                 },
                 [&](std::string* out) {
                   *out = std::string(text);
                   return Status();
                 },
                 [&](std::vector<std::string>* out) {
                   out->clear();
                   while (!text.empty()) {
                     const size_t comma = text.find(',');
                     out->emplace_back(text.substr(0, comma));
                     text = comma == std::string_view::npos ? "" : text.substr(comma + 1);
                   }
                   return Status();
                 },
                 [&](ByteCount out) {
                   if (text == "unlimited") {
                     *out.value = ~uint64_t{0};
                     return Status();
                   }
                   const Result<uint64_t> bytes = parse_bytes(text);
                   if (!bytes.ok() || *bytes > static_cast<uint64_t>(INT64_MAX)) {
                     return refuse(field, text);
                   }
                   *out.value = *bytes;
                   return Status();
                 },
                 [&](const NumberOrWord& out) {
                   const bool other = !out.other.empty() && text == out.other;
                   if (text != out.word && !other) return set_whole(field, out.value, text);
                   *out.value = other ? out.value_of_other : out.value_of_word;
                   return Status();
                 },
                 [&](const NameOf& out) {
                   for (size_t i = 0; i < out.names.size(); ++i) {
                     if (out.names[i] != text) continue;
                     *out.value = static_cast<uint8_t>(i);
                     return Status();
                   }
                   return refuse(field, text);
                 },
                 [&](const Number& out) {
                   const Result<uint64_t> size = parse_bytes(text);
                   double value = size.ok() ? static_cast<double>(*size) : 0;
                   // A size is whole; a number need not be.
                   const bool number = set_from_text(Field(&value), text).ok();
                   return (size.ok() || number) && set_number(out, value) ? Status()
                                                                          : refuse(field, text);
                 }},
      field);
}

bool in_bounds(const Number& number, double value) {
  if (!(value >= number.least && value <= number.most) || !std::isfinite(value)) return false;
  if (std::holds_alternative<double*>(number.value)) return true;
  const bool wide = std::holds_alternative<uint64_t*>(number.value);
  return value == std::floor(value) && value <= (wide ? 1.8e19 : 4e9);
}

bool set_from_value(const Field& field, const TomlValue& given) {
  const auto* whole = std::get_if<int64_t>(&given.value);
  const auto* text = std::get_if<std::string>(&given.value);
  const auto take = [&]<typename T>(T* out) {
    const T* value = std::get_if<T>(&given.value);
    if (value != nullptr) *out = *value;
    return value != nullptr;
  };
  const auto take_whole = [&]<typename T>(T* out) {
    const bool fits = whole != nullptr && std::in_range<T>(*whole);
    if (fits) *out = static_cast<T>(*whole);
    return fits;
  };
  const auto take_real = [&](double* out) {
    const auto* real = std::get_if<double>(&given.value);
    if (real != nullptr && std::isfinite(*real)) return *out = *real, true;
    if (whole != nullptr) return *out = static_cast<double>(*whole), true;
    return false;
  };
  const bool set = std::visit(
      Overloaded{
          [&](bool* out) { return take(out); }, [&](uint32_t* out) { return take_whole(out); },
          [&](uint64_t* out) { return take_whole(out); },
          [&](double* out) { return take_real(out); }, [&](std::string* out) { return take(out); },
          [&](std::vector<std::string>* out) { return take(out); },
          [&](ByteCount out) { return take_whole(out.value); },
          [&](const NameOf&) { return false; },
          [&](const NumberOrWord& out) { return take_whole(out.value); },
          [&](const Number& out) {
            double value = 0;
            return take_real(&value) && set_number(out, value);
          }},
      field);
  const bool of_text =
      std::holds_alternative<ByteCount>(field) || std::holds_alternative<NameOf>(field) ||
      std::holds_alternative<NumberOrWord>(field) || std::holds_alternative<Number>(field);
  return set || (of_text && text != nullptr && set_from_text(field, *text).ok());
}

std::string excerpt(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 60)) {
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
  }
  return text.size() > 60 ? out + "..." : out;
}

std::string did_you_mean(std::string_view name, std::span<const std::string_view> names) {
  const std::string_view nearest =
      nearest_name(name, std::vector<std::string_view>(names.begin(), names.end()));
  return nearest.empty() ? fmt::format("; there are {}", fmt::join(names, ", "))
                         : fmt::format("; did you mean {}?", nearest);
}

std::vector<TomlEntry> KeyReader::parse(std::string_view text) {
  const toml::parse_result parsed = toml::parse(text, path_);
  std::vector<TomlEntry> entries;
  if (!parsed) {
    problem(place_of(parsed.error().source()), excerpt(parsed.error().description()));
    return entries;
  }
  for (const auto& [name, node] : parsed.table()) {
    TomlEntry& entry = entries.emplace_back();
    entry.name = std::string(name.str());
    entry.at = place_of(name.source());
    entry.value = value_of(node);
    const toml::array* list = node.as_array();
    if (const toml::table* table = node.as_table()) {
      entry.kind = TomlEntry::Kind::kTable;
      entry.tables.push_back(table_of(*table));
    } else if (list != nullptr && std::ranges::all_of(*list, &toml::node::is_table)) {
      entry.kind = TomlEntry::Kind::kTables;
      for (const toml::node& item : *list) entry.tables.push_back(table_of(*item.as_table()));
    }
  }
  return entries;
}

void KeyReader::problem(const TomlPlace& at, std::string_view text) {
  problem(fmt::format("{}:{}:{}: {}", path_, at.line, at.column, text));
}

void KeyReader::problem(std::string text) {
  constexpr size_t kProblemsMax = 10;
  if (problems_.size() < kProblemsMax) {
    problems_.push_back(std::move(text));
  } else {
    ++left_out_;
  }
}

Status KeyReader::status(std::string advice) const {
  if (problems_.empty()) return {};
  std::string text = fmt::format("{}", fmt::join(problems_, "\n"));
  if (left_out_ > 0) text += fmt::format("\nand {} more", left_out_);
  return Status(ErrorCode::kInvalidArgument, std::move(text), std::move(advice));
}

void KeyReader::read(std::string_view section, const TomlTable& table,
                     std::span<const NamedField> fields) {
  for (const TomlTable::Key& key : table.keys) read(section, key, fields);
}

bool KeyReader::read(std::string_view section, const TomlTable::Key& key,
                     std::span<const NamedField> fields) {
  const auto full = [&](std::string_view name) {
    return section.empty() ? std::string(name) : fmt::format("{}.{}", section, name);
  };
  const auto field = std::ranges::find(fields, key.name, &NamedField::name);
  if (field == fields.end()) {
    std::vector<std::string_view> names;
    for (const NamedField& one : fields) names.push_back(one.name);
    problem(key.at, fmt::format("unknown key '{}'{}", excerpt(full(key.name)),
                                did_you_mean(key.name, names)));
    return false;
  }
  if (!set_from_value(field->field, key.value)) {
    problem(key.value.at, fmt::format("{}: expected {}, found {}", full(key.name),
                                      expected(field->field), key.value.found));
  }
  return true;
}

std::span<const TomlTable> KeyReader::list_of(const TomlEntry& entry, size_t most) {
  if (entry.kind != TomlEntry::Kind::kTables) {
    problem(entry.value.at, fmt::format("{0}s are a list of tables: write [[{0}]], in double "
                                        "brackets, above each {0}'s keys",
                                        entry.name));
    return {};
  }
  if (entry.tables.size() > most) {
    problem(entry.value.at,
            fmt::format("{} {}s; at most {}", entry.tables.size(), entry.name, most));
    return {};
  }
  return entry.tables;
}

}  // namespace smartinf::base
