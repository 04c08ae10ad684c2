#include "smartinf/sim/template.h"

#include <vector>

#include "smartinf/base/check.h"

namespace smartinf::sim {
namespace {

using nlohmann::json;

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

/// Innermost last.
using Scopes = std::vector<const json*>;

const json& find(const Scopes& scopes, std::string_view name) {
  for (size_t i = scopes.size(); i-- > 0;) {
    const auto found = scopes[i]->find(name);
    if (found != scopes[i]->end()) return *found;
  }
  SI_CHECK(false, "a template names a value that is not given");
  return *scopes.front();
}

void fill(std::string_view text, Scopes& scopes, std::string& out) {
  while (!text.empty()) {
    const size_t open = text.find("{{");
    out += text.substr(0, open);
    if (open == std::string_view::npos) return;
    const size_t close = text.find("}}", open);
    SI_CHECK(close != std::string_view::npos, "a template has {{ without }}");
    std::string_view tag = text.substr(open + 2, close - open - 2);
    text.remove_prefix(close + 2);
    const char kind = tag.front();
    if (kind != '#' && kind != '^') {
      const json& value = find(scopes, tag);
      out += escaped(value.is_string() ? value.get<std::string>() : value.dump());
      continue;
    }
    tag.remove_prefix(1);
    const std::string end = "{{/" + std::string(tag) + "}}";
    const size_t length = text.find(end);
    SI_CHECK(length != std::string_view::npos, "a template has a section without an end");
    const std::string_view section = text.substr(0, length);
    text.remove_prefix(length + end.size());
    const json& value = find(scopes, tag);
    if (value.is_array()) {
      for (const json& item : value) {
        scopes.push_back(&item);
        fill(section, scopes, out);
        scopes.pop_back();
      }
    } else if (value.get<bool>() == (kind == '#')) {
      fill(section, scopes, out);
    }
  }
}

}  // namespace

std::string fill_template(std::string_view text, const json& values) {
  std::string out;
  Scopes scopes{&values};
  fill(text, scopes, out);
  return out;
}

}  // namespace smartinf::sim
