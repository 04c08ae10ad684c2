// The recipe and its keys as text: --print-config, --help-recipe, docs/recipe.md.
#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include "smartinf/config/keys.h"
#include "smartinf/config/recipe.h"

namespace smartinf::config {
namespace {

std::string origin_text(const LoadedRecipe& loaded, std::string_view key) {
  const auto found = loaded.origins.find(key);
  if (found == loaded.origins.end()) return "default";
  if (found->second.kind == Origin::Kind::kFlag) return "flag";
  if (found->second.kind == Origin::Kind::kMachine) return "this machine";
  std::string path = loaded.path;
  for (char& c : path) {  // a file name may hold anything; a comment must not
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return fmt::format("{}:{}", path, found->second.line);
}

std::string_view type_name(const base::Field& field) {
  struct Name {
    std::string_view operator()(const bool*) const { return "true or false"; }
    std::string_view operator()(const uint32_t*) const { return "whole number"; }
    std::string_view operator()(const uint64_t*) const { return "whole number"; }
    std::string_view operator()(const double*) const { return "number"; }
    std::string_view operator()(const std::string*) const { return "text"; }
    std::string_view operator()(const std::vector<std::string>*) const { return "list of texts"; }
    std::string_view operator()(const base::ByteCount&) const { return "size"; }
    std::string_view operator()(const base::NameOf&) const { return "choice"; }
    std::string_view operator()(const base::NumberOrWord&) const { return "whole number"; }
    std::string_view operator()(const base::Number&) const { return "number"; }
  };
  return std::visit(Name{}, field);
}

std::string choices(const base::Field& field) {
  const auto* choice = std::get_if<base::NameOf>(&field);
  if (choice == nullptr) return {};
  return fmt::format(" (\"{}\")", fmt::join(choice->names, "\", \""));
}

std::vector<Key> keys_of(std::string_view section) {
  std::vector<Key> out;
  std::ranges::copy_if(keys(), std::back_inserter(out),
                       [&](const Key& key) { return section_of(key.name) == section; });
  return out;
}

/// Whether config.json has the key where the model comes from a folder; the recipe has none of it
/// then.
bool is_model_size(std::string_view key) {
  return section_of(key) == "model" && key != "model.from" && key != "model.init" &&
         key != "model.ignored_keys";
}

// The defaults, with one device to show those of its keys.
Recipe default_recipe() {
  Recipe recipe;
  recipe.updater.devices.emplace_back().rank = engine::kAnyRank;
  return recipe;
}

// [model], or [[device]].
std::string heading(std::string_view section) {
  return section == kDeviceSection ? fmt::format("[[{}]]", section) : fmt::format("[{}]", section);
}

}  // namespace

std::string print_recipe(const LoadedRecipe& loaded) {
  // Fields are pointers to mutable values, which a const recipe has none of.
  Recipe recipe = loaded.recipe;
  std::string out;
  for (const Section& section : sections()) {
    const bool is_device = section.name == kDeviceSection;
    const size_t tables = is_device ? recipe.updater.devices.size() : 1;
    for (size_t i = 0; i < tables; ++i) {
      out += fmt::format("{}{}\n", out.empty() ? "" : "\n", heading(section.name));
      for (const Key& key : keys_of(section.name)) {
        if (!recipe.options.model.from.empty() && is_model_size(key.name)) continue;
        const std::string line =
            fmt::format("{} = {}", name_of(key.name), base::format_value(key.field(recipe, i)));
        out += fmt::format("{:<48}  # {}\n", line, origin_text(loaded, numbered_key(key.name, i)));
      }
    }
  }
  return out;
}

std::vector<KeyChange> changed_keys(const Recipe& before, const Recipe& now) {
  // Fields are pointers to mutable values.
  Recipe old_recipe = before;
  Recipe new_recipe = now;
  const auto same_place = [](const base::Field& a, const base::Field& b) {
    const auto place = [](const base::Field& field) {
      std::error_code error;
      return std::filesystem::weakly_canonical(*std::get<std::string*>(field), error);
    };
    return place(a) == place(b);
  };
  std::vector<KeyChange> changes;
  for (const Key& key : keys()) {
    const bool of_device = section_of(key.name) == kDeviceSection;
    const bool is_path = key.name == "device.path" || key.name == "train.run";
    const size_t old_count = of_device ? old_recipe.updater.devices.size() : 1;
    const size_t new_count = of_device ? new_recipe.updater.devices.size() : 1;
    for (size_t i = 0; i < std::max(old_count, new_count); ++i) {
      if (i >= std::min(old_count, new_count) && !is_path) continue;
      KeyChange change{numbered_key(key.name, i), "none", "none"};
      if (i < old_count) change.before = base::format_value(key.field(old_recipe, i));
      if (i < new_count) change.now = base::format_value(key.field(new_recipe, i));
      if (change.before == change.now) continue;
      if (is_path && i < std::min(old_count, new_count) &&
          same_place(key.field(old_recipe, i), key.field(new_recipe, i))) {
        continue;
      }
      changes.push_back(std::move(change));
    }
  }
  return changes;
}

std::string recipe_reference() {
  Recipe recipe = default_recipe();
  std::string out =
      "# Recipes\n\n"
      "A recipe is a TOML file with the sections below; every key has a default. Each key is also "
      "a\n"
      "flag: `smartinf train RECIPE --train.steps 100 --device.0.path /mnt/a`, or\n"
      "`--set train.steps=100`. A flag wins over the file, the file over the default, and\n"
      "`smartinf train RECIPE --print-config` shows every value and where it came from. A flag\n"
      "takes the entries of a list separated by commas. A size is `512MiB`, `4GiB` or a number of\n"
      "bytes.\n\n"
      "This page is generated by `smartinf train --help-recipe=markdown`.\n";
  for (const Section& section : sections()) {
    out += fmt::format("\n## {}\n\n{}\n\n", heading(section.name), section.help);
    out += "| key | type | default | meaning |\n|---|---|---|---|\n";
    for (const Key& key : keys_of(section.name)) {
      const base::Field field = key.field(recipe, 0);
      out += fmt::format("| `{}` | {} | `{}` | {}{} |\n", name_of(key.name), type_name(field),
                         base::format_value(field), key.help, choices(field));
    }
  }
  return out;
}

std::string recipe_help() {
  Recipe recipe = default_recipe();
  std::string out =
      "Keys of a recipe, with their defaults. Each is a flag, too: --train.steps 100,\n"
      "--device.0.path DIR, or --set train.steps=100.\n";
  for (const Section& section : sections()) {
    out += fmt::format("\n{}  {}\n", heading(section.name), section.help);
    for (const Key& key : keys_of(section.name)) {
      const base::Field field = key.field(recipe, 0);
      out += fmt::format("  {:<44} {}{}\n",
                         fmt::format("{} = {}", name_of(key.name), base::format_value(field)),
                         key.help, choices(field));
    }
  }
  return out;
}

}  // namespace smartinf::config
