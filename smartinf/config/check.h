// Whether a recipe's values can work together, before anything is opened.
#pragma once

#include "smartinf/base/status.h"
#include "smartinf/config/recipe.h"

namespace smartinf::config {

/// Ok, or the first value that cannot work: the message begins with its dotted key and says what to
/// do. Looks at no files. Values of the modules that check their own are left to them.
base::Status check_recipe(const Recipe& recipe);

}  // namespace smartinf::config
