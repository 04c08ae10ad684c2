// Fills a text in the form of Mustache templates, of which it knows a part.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace smartinf::sim {

/// {{name}} is the value, escaped for HTML; {{#name}}...{{/name}} is repeated for each object of an
/// array, whose values hide those outside, and stands once where the value is true; {{^name}}... is
/// the other way round. A name that is not known, or a section without an end, is a bug (SI_CHECK).
std::string fill_template(std::string_view text, const nlohmann::json& values);

}  // namespace smartinf::sim
