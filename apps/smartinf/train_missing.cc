// `smartinf train`, `distill` and `generate` of a build without torch: recipes can be read and
// explained, not run.
#include <memory>

#include <fmt/format.h>

#include "apps/smartinf/recipe_flags.h"

namespace smartinf::apps {

void add_train(CLI::App& app, const Overrides& overrides, Run& run) {
  CLI::App* command = app.add_subcommand("train",
                                         "Train a model (not in this build, which has no torch: "
                                         "only --print-config and --help-recipe work)");
  auto flags = std::make_shared<RecipeFlags>();
  add_recipe_flags(*command, *flags);
  command->callback([flags, &overrides, &run] {
    run = [flags, &overrides] {
      config::LoadedRecipe loaded;
      if (const std::optional<int> code = read_recipe(*flags, overrides, loaded)) return *code;
      return report(base::Status(base::ErrorCode::kUnsupported,
                                 "this smartinf was built without torch and cannot train",
                                 "Run scripts/setup.sh, which installs torch and builds again."));
    };
  });
}

namespace {

void add_missing(CLI::App& app, const char* name, Run& run) {
  CLI::App* command = app.add_subcommand(name, "Not in this build, which has no torch");
  command->allow_extras();
  command->callback([name, &run] {
    run = [name] {
      return report(
          base::Status(base::ErrorCode::kUnsupported,
                       fmt::format("this smartinf was built without torch and cannot {}", name),
                       "Run scripts/setup.sh, which installs torch and builds again."));
    };
  });
}

}  // namespace

void add_distill(CLI::App& app, const Overrides& /*overrides*/, Run& run) {
  add_missing(app, "distill", run);
}

void add_generate(CLI::App& app, Run& run) { add_missing(app, "generate", run); }

std::optional<int> run_with_torch(std::string_view /*command*/, char** /*arguments*/) {
  return std::nullopt;
}

}  // namespace smartinf::apps
