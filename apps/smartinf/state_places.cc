#include "apps/smartinf/state_places.h"

#include <filesystem>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/config/keys.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/train/position.h"
#include "smartinf/train/run_folder.h"

namespace smartinf::apps {

bool is_run_folder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(std::filesystem::path(path) / train::kRecipeFile, error);
}

bool has_begun(const std::string& folder) {
  std::error_code error;
  const std::filesystem::path path(folder);
  return std::filesystem::exists(path / train::kRunFile, error) ||
         std::filesystem::exists(path / train::kLogFile, error);
}

base::Result<config::LoadedRecipe> load_run(const std::string& folder,
                                            std::span<const config::Override> overrides) {
  const std::string path = (std::filesystem::path(folder) / train::kRecipeFile).string();
  SI_ASSIGN_OR_RETURN(config::LoadedRecipe loaded, config::load_recipe(path, overrides));
  const auto by_flag = [&](const std::string& key) {
    const auto origin = loaded.origins.find(key);
    return origin != loaded.origins.end() && origin->second.kind == config::Origin::Kind::kFlag;
  };
  if (by_flag("train.run")) return loaded;
  SI_ASSIGN_OR_RETURN(const std::optional<train::RunRecord> record, train::read_run_record(folder));
  std::string& run = loaded.recipe.options.train.run;
  const std::string inside = run + "/";
  std::vector<engine::DeviceOptions>& devices = loaded.recipe.updater.devices;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (by_flag(config::numbered_key("device.path", i))) continue;
    if (record && record->devices.size() == devices.size()) {
      devices[i].path = record->devices[i];
    } else if (devices[i].path.starts_with(inside)) {  // before folders kept a record
      devices[i].path = folder + "/" + devices[i].path.substr(inside.size());
    }
  }
  run = folder;
  return loaded;
}

base::Status use_checkpoint(const std::string& path, config::Recipe& recipe) {
  if (recipe.options.train.where == train::OptimizerWhere::kMemory) {
    return base::Status(base::ErrorCode::kUnsupported,
                        "optimizer.where is \"memory\", of which there are no checkpoints",
                        "Leave out --checkpoint");
  }
  std::string folder = path;
  if (!engine::is_checkpoint(path)) {
    const std::vector<engine::Checkpoint> found = engine::list_checkpoints(path);
    if (found.empty()) {
      return base::Status(base::ErrorCode::kNotFound, "there is no checkpoint",
                          "Name one, e.g. RUN/checkpoints/best or RUN/checkpoints/step-00000100",
                          base::ErrorPlace{path, {}, {}, 0});
    }
    folder = found.back().path;
  }
  SI_ASSIGN_OR_RETURN(const std::vector<std::string> devices, devices_of({folder}));
  recipe.updater.devices.clear();
  for (const std::string& device : devices) recipe.updater.devices.emplace_back().path = device;
  return base::Status();
}

base::Result<std::vector<std::string>> devices_of(const std::vector<std::string>& words,
                                                  serve::RemoteOptions* remote) {
  std::vector<std::string> devices;
  for (const std::string& word : words) {
    if (is_run_folder(word)) {
      SI_ASSIGN_OR_RETURN(const config::LoadedRecipe loaded, load_run(word));
      for (const engine::DeviceOptions& device : loaded.recipe.updater.devices) {
        devices.push_back(device.path);
      }
      if (remote != nullptr && remote->certificate.empty()) {
        *remote = loaded.recipe.updater.remote;
      }
    } else if (engine::is_checkpoint(word)) {
      SI_ASSIGN_OR_RETURN(const engine::Checkpoint checkpoint, engine::read_checkpoint(word));
      SI_RETURN_IF_ERROR(engine::check_one_rank(checkpoint));
      SI_RETURN_IF_ERROR(engine::check_devices(checkpoint));
      devices.insert(devices.end(), checkpoint.devices.begin(), checkpoint.devices.end());
    } else {
      devices.push_back(word);
    }
  }
  return devices;
}

StateOwner owner_of(const std::string& client_metadata) {
  using Kind = StateOwner::Kind;
  if (const auto position = train::Position::from_json(client_metadata); position.ok()) {
    return {Kind::kTrain, position->folder};
  }
  const nlohmann::json json = base::parse_json(client_metadata);
  // The fields that the Python package keeps with a step (python/smartinf/lineage.py).
  const bool python = json.is_object() && json.contains("branch") && json.contains("updates");
  return {python ? Kind::kPython : Kind::kUnknown, {}};
}

std::string owner_text(const StateOwner& owner) {
  if (owner.kind == StateOwner::Kind::kPython) return "a program with the Python package";
  if (owner.kind == StateOwner::Kind::kUnknown) return {};
  return owner.folder.empty() ? "a run of smartinf train" : "the run in " + owner.folder;
}

base::Result<uint64_t> memory_budget(const std::string& text) {
  base::Result<uint64_t> bytes = base::parse_bytes(text);
  constexpr uint64_t kMost = uint64_t{1} << 50;
  if (!bytes.ok() || (*bytes >= base::kMiB && *bytes <= kMost)) return bytes;
  return base::Status(base::ErrorCode::kInvalidArgument,
                      "--memory-budget is " + base::format_bytes(*bytes),
                      "Choose a size from " + base::format_bytes(base::kMiB) + " to " +
                          base::format_bytes(kMost) + ".");
}

}  // namespace smartinf::apps
