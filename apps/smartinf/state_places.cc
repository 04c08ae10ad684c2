#include "apps/smartinf/state_places.h"

#include <filesystem>
#include <utility>

#include "smartinf/config/recipe.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/train/run_folder.h"

namespace smartinf::apps {

bool is_run_folder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(std::filesystem::path(path) / train::kRecipeFile, error);
}

base::Result<std::vector<std::string>> devices_of(const std::vector<std::string>& words) {
  std::vector<std::string> devices;
  for (const std::string& word : words) {
    if (is_run_folder(word)) {
      const auto recipe = std::filesystem::path(word) / train::kRecipeFile;
      SI_ASSIGN_OR_RETURN(const config::LoadedRecipe loaded,
                          config::load_recipe(recipe.string(), {}));
      for (const engine::DeviceOptions& device : loaded.recipe.updater.devices) {
        devices.push_back(device.path);
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

}  // namespace smartinf::apps
