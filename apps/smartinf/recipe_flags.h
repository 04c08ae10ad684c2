// The flags that every command with a recipe has: RECIPE, --print-config, --help-recipe, --set and
// one dotted flag for each key.
#pragma once

#include <optional>
#include <string>

#include "apps/smartinf/commands.h"

namespace smartinf::apps {

struct RecipeFlags {
  std::string path;
  bool print_config = false;
  std::string help_recipe;  // "text" or "markdown"; empty: not asked for
};

/// Adds them to a subcommand. `flags` outlives the parse.
void add_recipe_flags(CLI::App& command, RecipeFlags& flags);

/// True for a subcommand that add_recipe_flags was called on.
bool takes_recipe(const CLI::App& command);

/// Loads the recipe into `loaded`, or does what else was asked for. An exit code when the command
/// is done with that: help or the configuration was printed, or the recipe is wrong (reported).
std::optional<int> read_recipe(const RecipeFlags& flags, const Overrides& overrides,
                               config::LoadedRecipe& loaded);

}  // namespace smartinf::apps
