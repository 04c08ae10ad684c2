#include "smartinf/config/recipe.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <functional>
#include <set>
#include <sstream>
#include <type_traits>

#include <fmt/format.h>

#include "smartinf/base/file.h"
#include "smartinf/base/nearest.h"
#include "smartinf/base/user_path.h"
#include "smartinf/config/check.h"
#include "smartinf/config/keys.h"

namespace smartinf::config {
namespace {

using base::ErrorCode;
using base::excerpt;
using base::Status;

constexpr uint64_t kFileBytesMax = uint64_t{1} << 20;
constexpr size_t kDevicesMax = 1024;

const Key* find_key(std::string_view name) {
  const std::span<const Key> all = keys();
  const auto found = std::ranges::find(all, name, &Key::name);
  return found == all.end() ? nullptr : &*found;
}

/// A text where train.sample_prompts is a list; recipes that older runs keep have it.
constexpr std::string_view kSamplePrompt = "train.sample_prompt";

/// Keys that there were, and what to write in their place.
constexpr std::pair<std::string_view, std::string_view> kFormerKeys[] = {
    {"train.checkpoint_activations",
     "it is memory.activations now: true is \"recompute\", false is \"keep\""},
    {"compress.codec", "compress.density sends the largest elements"},
    {"compress.ratio",
     "it is compress.density now, the share of the elements: ratio = 0.02 sent signs of 8 %, "
     "density = 0.08, or 1 % as numbers, density = 0.01"},
    {"compress.feedback", "it is compress.error_feedback now, true or false"},
    {"compress.keep_every", "it is compress.residual_every now"},
    {"compress.ratio_max", "there is no longer an automatic ratio: choose a compress.density"},
    {"compress.backlog", "there is no longer an automatic ratio: choose a compress.density"},
    {"compress.feedback_decay", "the residual no longer decays: leave it out"},
    {"compress.variance", "it no longer has a choice: compress.error_feedback decides"},
    {"compress.step_ahead", "it no longer has a choice: compress.error_feedback decides"},
};

/// Each path of a recipe, with its key. What is no path stays as it is: python-stdlib, and the
/// devices of other machines.
void for_each_path(Recipe& recipe,
                   const std::function<void(const std::string& key, std::string& path)>& visit) {
  train::Options& options = recipe.options;
  visit("model.from", options.model.from);
  visit("teacher.from", recipe.distill.teacher);
  visit("student.from", recipe.distill.student);
  visit("train.run", options.train.run);
  visit("checkpoint.folder", options.checkpoint.folder);
  visit("data.tokenizer", options.data.tokenizer);
  if (!options.ranks.cluster.empty()) visit("ranks.cluster", options.ranks.cluster);
  for (std::string& path : options.data.paths) visit("data.paths", path);
  for (std::string& path : options.data.validation_paths) visit("data.validation_paths", path);
  for (std::string& named : options.data.evaluation) {
    const size_t begin = named.find_first_not_of(' ', named.find('=') + 1);
    if (named.find('=') == std::string::npos || begin == std::string::npos) continue;
    std::string path = named.substr(begin);
    visit("data.evaluation", path);
    named = named.substr(0, begin) + path;
  }
  visit("remote.certificate", recipe.updater.remote.certificate);
  visit("remote.key", recipe.updater.remote.key);
  visit("remote.ca", recipe.updater.remote.ca);
  for (size_t i = 0; i < recipe.updater.devices.size(); ++i) {
    visit(numbered_key("device.path", i), recipe.updater.devices[i].path);
  }
}

std::string suggestion(std::string_view name) {
  for (const auto& [former, now] : kFormerKeys) {
    if (name == former) return fmt::format("; {}", now);
  }
  std::vector<std::string_view> names;
  for (const Key& key : keys()) names.push_back(key.name);
  const std::string_view nearest = base::nearest_name(name, names);
  if (nearest.empty()) return "; `smartinf train --help-recipe` lists all keys";
  return fmt::format("; did you mean {}?", nearest);
}

std::string section_suggestion(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Section& section : sections()) names.push_back(section.name);
  const std::string_view nearest = base::nearest_name(name, names);
  if (nearest.empty()) return fmt::format("; sections are {}", fmt::join(names, ", "));
  return nearest == kDeviceSection ? "; did you mean [[device]]?"
                                   : fmt::format("; did you mean [{}]?", nearest);
}

// Puts one recipe together and collects everything that is wrong with it.
class Reader {
 public:
  explicit Reader(const std::string& path) : file_(path) { loaded_.path = path; }

  void read_file(std::string_view text) {
    for (const base::TomlEntry& entry : file_.parse(text)) {
      const bool known =
          std::ranges::find(sections(), entry.name, &Section::name) != sections().end();
      if (!known && entry.kind == Kind::kTable) {
        file_.problem(entry.at, fmt::format("unknown section [{}]{}", excerpt(entry.name),
                                            section_suggestion(entry.name)));
      } else if (!known) {
        file_.problem(entry.at, fmt::format("unknown key '{}'{}", excerpt(entry.name),
                                            suggestion(entry.name)));
      } else if (entry.name == kDeviceSection) {
        read_devices(entry);
      } else if (entry.kind == Kind::kTable) {
        read_table(entry.name, entry.tables.front(), 0);
      } else {
        file_.problem(entry.value.at,
                      fmt::format("{} is a section: write [{}] on a line of its own", entry.name,
                                  entry.name));
      }
    }
  }

  void apply(std::span<const Override> overrides) {
    add_devices_of(overrides);
    for (const Override& override : overrides) apply(override);
  }

  /// Fills in what follows from other values and checks all of them.
  base::Result<LoadedRecipe> finish() {
    Recipe& recipe = loaded_.recipe;
    if (recipe.options.train.run.empty()) {
      const std::string stem = std::filesystem::path(loaded_.path).stem().string();
      recipe.options.train.run = "runs/" + (stem.empty() ? "unnamed" : stem);
    }
    // With epochs the default number of steps says nothing.
    if (recipe.options.train.epochs > 0 && !loaded_.origins.contains("train.steps")) {
      recipe.options.train.steps = 0;
    }
    if (recipe.updater.devices.empty()) {
      recipe.updater.devices.emplace_back().path = recipe.options.train.run + "/state";
    }
    for (size_t i = 0; i < recipe.updater.devices.size(); ++i) {
      if (loaded_.origins.contains(numbered_key("device.rank", i))) continue;
      recipe.updater.devices[i].rank = engine::kAnyRank;
    }
    if (!loaded_.origins.contains("optimizer.gradient_type")) {
      recipe.updater.gradient_type = train::precision_data_type(recipe.options.train.precision);
    }
    compress::CompressOptions& compress = recipe.updater.compress;
    if (!loaded_.origins.contains("compress.values")) compress.values = compress.default_values();
    recipe.updater.where = recipe.options.train.where == train::OptimizerWhere::kHost
                               ? engine::UpdateWhere::kHost
                               : engine::UpdateWhere::kDevice;
    for_each_path(recipe, [&](const std::string& key, std::string& path) {
      base::Result<std::string> expanded = base::user_path(path);
      if (expanded.ok()) {
        path = std::move(*expanded);
      } else {
        const Status& status = expanded.status();
        file_.problem(with_origin(Status(status.code(), fmt::format("{} is {}", key, status.what()),
                                         std::string(status.advice()))));
      }
    });
    if (file_.ok()) {
      const Status checked = check_recipe(recipe);
      if (!checked.ok()) file_.problem(with_origin(checked));
    }
    if (file_.ok()) check_compression_is_chosen();
    SI_RETURN_IF_ERROR(file_.status());
    return std::move(loaded_);
  }

 private:
  using Kind = base::TomlEntry::Kind;

  void read_devices(const base::TomlEntry& entry) {
    const std::span<const base::TomlTable> tables = file_.list_of(entry, kDevicesMax);
    loaded_.recipe.updater.devices.resize(tables.size());
    for (size_t i = 0; i < tables.size(); ++i) {
      if (std::ranges::find(tables[i].keys, "path", &base::TomlTable::Key::name) ==
          tables[i].keys.end()) {
        file_.problem(tables[i].at,
                      fmt::format("device {} has no path; add path = \"/a/directory\"", i));
      }
      read_table(kDeviceSection, tables[i], i);
    }
  }

  void read_table(std::string_view section, const base::TomlTable& table, size_t device) {
    for (const auto& [name, at, value] : table.keys) {
      const std::string full = fmt::format("{}.{}", section, name);
      const auto* text = std::get_if<std::string>(&value.value);
      if (full == kSamplePrompt && text != nullptr) {
        loaded_.recipe.options.train.sample_prompts = {*text};
        continue;
      }
      const Key* key = find_key(full);
      if (key == nullptr) {
        file_.problem(at, fmt::format("unknown key '{}'{}", excerpt(full), suggestion(full)));
        continue;
      }
      const base::Field field = key->field(loaded_.recipe, device);
      if (!base::set_from_value(field, value)) {
        file_.problem(value.at, fmt::format("{}: expected {}, found {}", full,
                                            base::expected(field), value.found));
        continue;
      }
      loaded_.origins[numbered_key(full, device)] = {Origin::Kind::kFile, value.at.line};
    }
  }

  // device.3.path -> 3, device.path. Nothing for other keys.
  static std::optional<std::pair<size_t, std::string>> split_device_key(std::string_view key) {
    if (section_of(key) != kDeviceSection) return std::nullopt;
    const std::string_view rest = name_of(key);
    size_t number = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
    const auto digits = static_cast<size_t>(end - rest.data());
    if (error != std::errc() || digits >= rest.size() || rest[digits] != '.') return std::nullopt;
    return std::pair(number, fmt::format("device.{}", rest.substr(digits + 1)));
  }

  // Flags may add devices to those of the file, as long as their numbers have no gap.
  void add_devices_of(std::span<const Override> overrides) {
    std::set<size_t> numbers;
    for (const Override& override : overrides) {
      if (const auto split = split_device_key(override.key)) numbers.insert(split->first);
    }
    std::vector<engine::DeviceOptions>& devices = loaded_.recipe.updater.devices;
    for (const size_t number : numbers) {
      if (number == devices.size() && number < kDevicesMax) devices.emplace_back();
    }
  }

  void apply(const Override& override) {
    std::string name = override.key;
    size_t device = 0;
    if (auto split = split_device_key(override.key)) {
      device = split->first;
      name = std::move(split->second);
      const size_t count = loaded_.recipe.updater.devices.size();
      if (device >= count) {
        file_.problem(fmt::format(
            "--{}: there {} {} device{}; devices are numbered from 0 without gaps",
            excerpt(override.key), count == 1 ? "is" : "are", count, count == 1 ? "" : "s"));
        return;
      }
    } else if (section_of(override.key) == kDeviceSection) {
      file_.problem(
          fmt::format("--{}: say which device, e.g. --device.0.path", excerpt(override.key)));
      return;
    }
    const Key* key = find_key(name);
    if (key == nullptr) {
      file_.problem(fmt::format("--{}: unknown key '{}'{}", excerpt(override.key), excerpt(name),
                                suggestion(name)));
      return;
    }
    const base::Field field = key->field(loaded_.recipe, device);
    Status set = base::set_from_text(field, override.value);
    // A path with a comma in it is one path, not two.
    if (auto* const* list = std::get_if<std::vector<std::string>*>(&field)) {
      std::error_code error;
      if (std::filesystem::exists(override.value, error)) **list = {override.value};
    }
    if (!set.ok()) {
      file_.problem(fmt::format("--{}: {}", override.key, excerpt_end(set.what())));
      return;
    }
    loaded_.origins[override.key] = {Origin::Kind::kFlag, 0};
  }

  // How to compress, and not that: gradients would be sent dense without a word.
  void check_compression_is_chosen() {
    if (loaded_.origins.contains("compress.density")) return;
    for (const auto& [key, origin] : loaded_.origins) {
      if (section_of(key) != "compress" || key.starts_with("compress.pipeline")) continue;
      file_.problem(with_origin(
          Status(ErrorCode::kInvalidArgument,
                 key + " is given without compress.density, so gradients would be sent dense",
                 "Add compress.density = 0.08 (or 0 for dense gradients).")));
      return;
    }
  }

  static std::string excerpt_end(std::string_view text) {
    return text.size() > 240 ? std::string(text.substr(0, 240)) + "..." : std::string(text);
  }

  // A check's message begins with the key it is about; this puts in front where its value is from.
  std::string with_origin(const Status& status) const {
    const std::string text = status.to_string();
    const auto origin = loaded_.origins.find(std::string_view(text).substr(0, text.find(' ')));
    if (origin == loaded_.origins.end()) return text;
    if (origin->second.kind == Origin::Kind::kFlag) return "--" + text;
    return fmt::format("{}:{}: {}", loaded_.path, origin->second.line, text);
  }

  LoadedRecipe loaded_;
  base::KeyReader file_;
};

bool is_boolean(std::string_view flag_key) {
  // The number in a device's key does not matter.
  const bool of_device = section_of(flag_key) == kDeviceSection;
  const Key* key = find_key(
      of_device
          ? fmt::format("device{}", flag_key.substr(std::min(flag_key.rfind('.'), flag_key.size())))
          : std::string(flag_key));
  if (key == nullptr) return false;
  Recipe scratch;
  scratch.updater.devices.resize(1);
  return std::holds_alternative<bool*>(key->field(scratch, 0));
}

}  // namespace

void make_inputs_absolute(Recipe& recipe) {
  for_each_path(recipe, [](const std::string& key, std::string& path) {
    std::error_code error;
    const std::string_view section = section_of(key);
    if (section != "model" && section != "data" && section != "remote") return;
    if (!std::filesystem::exists(path, error)) return;
    path = std::filesystem::absolute(path).lexically_normal().string();
  });
}

base::Result<LoadedRecipe> parse_recipe(std::string_view text, const std::string& path,
                                        std::span<const Override> overrides) {
  Reader reader(path);
  reader.read_file(text);
  reader.apply(overrides);
  return reader.finish();
}

base::Result<LoadedRecipe> load_recipe(const std::string& path,
                                       std::span<const Override> overrides) {
  if (path.empty()) return parse_recipe({}, path, overrides);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return Status(ErrorCode::kInvalidArgument, "the recipe is a directory",
                  "Name a .toml file, e.g. recipes/quickstart.toml.",
                  base::ErrorPlace{path, {}, {}, 0});
  }
  const base::Result<std::string> text =
      base::read_text_file(path, "cannot read the recipe", kFileBytesMax);
  if (!text.ok()) {
    const Status& why = text.status();
    return Status(why.code(), why.what(),
                  why.code() == ErrorCode::kNotFound
                      ? "Recipes that come with the project are in recipes/."
                      : "A recipe is a short TOML file; check that this is the right file.",
                  why.place());
  }
  return parse_recipe(*text, path, overrides);
}

base::Result<std::vector<Override>> take_overrides(std::vector<std::string>& words) {
  std::vector<Override> overrides;
  std::vector<std::string> rest;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--") {
      rest.insert(rest.end(), words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
      break;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const bool is_set = name == "--set";
    const bool is_dotted = name.starts_with("--") && name.find('.') != std::string::npos;
    if (!is_set && !is_dotted) {
      rest.push_back(word);
      continue;
    }
    std::optional<std::string> value;
    if (equals != std::string::npos) value = word.substr(equals + 1);
    if (is_dotted) {
      const std::string key = name.substr(2);
      if (!value && is_boolean(key)) {
        value = "true";
        if (i + 1 < words.size() && (words[i + 1] == "true" || words[i + 1] == "false")) {
          value = words[++i];
        }
      }
      if (!value && i + 1 < words.size() && !words[i + 1].starts_with("--")) value = words[++i];
      if (!value) {
        return Status(ErrorCode::kInvalidArgument, fmt::format("{} needs a value", excerpt(name)),
                      fmt::format("Write {} VALUE.", excerpt(name)));
      }
      overrides.push_back({key, *value});
      continue;
    }
    if (!value && i + 1 < words.size()) value = words[++i];
    const size_t middle = value ? value->find('=') : std::string::npos;
    if (middle == std::string::npos || middle == 0) {
      return Status(ErrorCode::kInvalidArgument, "--set needs KEY=VALUE",
                    "For example: --set train.steps=100.");
    }
    overrides.push_back({value->substr(0, middle), value->substr(middle + 1)});
  }
  words = std::move(rest);
  return overrides;
}

}  // namespace smartinf::config
