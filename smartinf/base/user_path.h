// Paths as users write them, where no shell has seen them: in a recipe, behind --out=.
#pragma once

#include <string>
#include <string_view>

#include "smartinf/base/status.h"

namespace smartinf::base {

/// `text` with the home folder that a leading "~" or "~name" stands for, as a shell has it. Errors:
/// kInvalidArgument for a user that is not there, and for a variable ("$HOME/run"), which only a
/// shell expands, unless something of that name exists: no folder called "~" or "$HOME" is made.
Result<std::string> user_path(std::string_view text);

}  // namespace smartinf::base
