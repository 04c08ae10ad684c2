// The name a user may have meant.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace smartinf::base {

/// Characters to insert, delete, replace or swap with their neighbour to get from one to the other.
size_t edit_distance(std::string_view a, std::string_view b);

/// Upper case counts as lower case, a dash as an underscore.
bool same_name(std::string_view a, std::string_view b);

/// The candidate closest to `name`, or empty when none is close enough to be worth a question.
/// Dotted names are compared as a whole and by their last part, so that a key under the wrong
/// section is found too. Upper case counts as lower case.
std::string_view nearest_name(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace smartinf::base
