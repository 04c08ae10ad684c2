// One recipe: the options of every module joined, read from a TOML file and from flags.
//
//   precedence: flag > file > default. A key that no module knows is an error that names the
//   nearest one; a value of the wrong type or out of range is an error that names file, line and
//   column.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/engine/options.h"
#include "smartinf/train/distill/options.h"
#include "smartinf/train/options.h"

namespace smartinf::config {

struct Recipe {
  train::Options options;          // [model], [data], [train], optimizer.where
  train::DistillOptions distill;   // [teacher], [student], [distill]
  engine::UpdaterOptions updater;  // [optimizer], [engine], [remote], [[device]]
  double restart_seconds = 600;    // [remote], of a training that has lost a device; 0: it ends
};

/// A key set on the command line: {"train.steps", "100"}, {"device.0.path", "/mnt/a"}.
struct Override {
  std::string key;
  std::string value;
};

/// Where a value came from.
struct Origin {
  enum class Kind : uint8_t { kDefault, kFile, kFlag, kMachine };  // kMachine: "auto" was chosen
  Kind kind = Kind::kDefault;
  uint32_t line = 0;  // kFile
};

struct LoadedRecipe {
  Recipe recipe;
  std::string path;  // as given; empty: flags only
  /// Origins by dotted key, for every key that is not at its default.
  std::map<std::string, Origin, std::less<>> origins;
};

/// Reads a recipe file, then applies the overrides, then fills in what follows (a run folder named
/// after the recipe, one device inside it when none is given) and checks every value.
/// `path` may be empty: defaults and overrides only.
/// Errors: kNotFound (no such file), kInvalidArgument; all problems found, one a line. For an app
/// every one of them is wrong usage.
base::Result<LoadedRecipe> load_recipe(const std::string& path,
                                       std::span<const Override> overrides);

/// The same on a text in memory; `path` is for messages.
base::Result<LoadedRecipe> parse_recipe(std::string_view text, const std::string& path,
                                        std::span<const Override> overrides);

/// Takes the dotted flags (--train.steps 100, --train.steps=100, --data.paths a,b) and every
/// --set KEY=VALUE out of the command line's words, wherever they stand. What is left has none.
/// A flag of a yes-or-no key may stand without a value. Errors: kInvalidArgument.
base::Result<std::vector<Override>> take_overrides(std::vector<std::string>& words);

/// The recipe as TOML, each value with a comment that says where it came from. Parsing it gives the
/// same recipe.
std::string print_recipe(const LoadedRecipe& loaded);

/// Makes the paths of what a run reads right from any working directory: a run's folder keeps its
/// recipe so. What does not exist (python-stdlib) stays as it is, and so does where the run writes.
void make_inputs_absolute(Recipe& recipe);

/// A key that has another value than before, both as in a recipe.
struct KeyChange {
  std::string key;
  std::string before;
  std::string now;
};
/// Paths of run and devices that lead to the same place are the same. A device that one of the two
/// does not have is named by its path alone.
std::vector<KeyChange> changed_keys(const Recipe& before, const Recipe& now);

/// Every key with type, default and meaning, as the page docs/recipe.md.
std::string recipe_reference();

/// The same for a terminal, for --help-recipe.
std::string recipe_help();

}  // namespace smartinf::config
