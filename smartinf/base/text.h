// Text that comes from outside: files that somebody else may have written.
#pragma once

#include <cstdint>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace smartinf::base {

/// How deep brackets and braces of JSON may stand in each other: parsers and printers that call
/// themselves for each level need so much stack at most.
inline constexpr uint32_t kJsonDepthMax = 64;

/// Whether JSON text stays within kJsonDepthMax; says nothing else of it.
bool json_depth_ok(std::string_view text);

/// Keys of all objects in JSON text: an object that keeps their order compares each with all before
/// it.
uint64_t json_keys(std::string_view text);

/// The value of JSON text, without exceptions: discarded (is_discarded()) where it is not JSON or
/// deeper than kJsonDepthMax.
nlohmann::json parse_json(std::string_view text);

/// Whether a name can be shown as it is: no control characters, by which a terminal could be made
/// to show something else.
bool printable(std::string_view name);

}  // namespace smartinf::base
