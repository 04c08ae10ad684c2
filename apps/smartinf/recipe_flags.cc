#include "apps/smartinf/recipe_flags.h"

#include <cstdio>
#include <filesystem>

#include "smartinf/train/run_folder.h"

#include "apps/smartinf/state_places.h"

namespace smartinf::apps {

void add_recipe_flags(CLI::App& command, RecipeFlags& flags) {
  command.add_option("recipe", flags.path, "Recipe, a TOML file")->type_name("RECIPE");
  command.add_flag("--print-config", flags.print_config,
                   "Show every value and where it came from, then exit");
  command
      .add_option("--help-recipe", flags.help_recipe,
                  "List the keys of a recipe, as text or markdown, then exit")
      ->expected(0, 1)
      ->default_str("text")
      ->check(CLI::IsMember({"text", "markdown"}))
      ->type_name("[FORM]");
  // For the help only: they are taken out of the command line before it is parsed.
  command
      .add_option("--SECTION.KEY,--set",
                  "Any key of the recipe: --train.steps 100, "
                  "--device.0.path DIR, --set train.steps=100")
      ->type_name("VALUE");
}

bool takes_recipe(const CLI::App& command) {
  return command.get_option_no_throw("--help-recipe") != nullptr;
}

std::optional<int> read_recipe(const RecipeFlags& flags, const Overrides& overrides,
                               config::LoadedRecipe& loaded) {
  if (!flags.help_recipe.empty()) {
    const bool markdown = flags.help_recipe == "markdown";
    const std::string text = markdown ? config::recipe_reference() : config::recipe_help();
    std::fputs(text.c_str(), stdout);
    return kExitDone;
  }
  if (flags.path.empty() && !flags.print_config) {
    return report(base::Status(base::ErrorCode::kInvalidArgument, "no recipe given",
                               "Name one, e.g. recipes/quickstart.toml."),
                  kExitUsage);
  }
  // A run's own recipe is of the run where it lies, also when that was copied or moved.
  const std::filesystem::path path(flags.path);
  const std::string folder = path.has_parent_path() ? path.parent_path().string() : ".";
  const bool kept = path.filename() == train::kRecipeFile && has_begun(folder);
  base::Result<config::LoadedRecipe> result =
      kept ? load_run(folder, overrides) : config::load_recipe(flags.path, overrides);
  if (!result.ok()) return report(result.status(), kExitUsage);
  loaded = std::move(result).value();
  if (flags.print_config) {
    std::fputs(config::print_recipe(loaded).c_str(), stdout);
    return kExitDone;
  }
  return std::nullopt;
}

}  // namespace smartinf::apps
