#include "smartinf/train/position.h"

#include <utility>

#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"

namespace smartinf::train {

std::string Position::to_json() const {
  nlohmann::json json{
      {"windows", windows}, {"data_seed", data_seed}, {"sequence", sequence}, {"corpus", corpus}};
  if (base != 0) json["base_weights"] = base;
  if (!folder.empty()) json["folder"] = folder;
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

base::Result<Position> Position::from_json(const std::string& text) {
  const nlohmann::json json = base::parse_json(text);
  Position position;
  for (const auto& [key, value] : {std::pair{"windows", &position.windows},
                                   {"data_seed", &position.data_seed},
                                   {"sequence", &position.sequence},
                                   {"corpus", &position.corpus}}) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    if (!json.is_object() || found == json.end() || !found->is_number_unsigned()) {
      return base::Status(base::ErrorCode::kMismatch, "the state was not made by this trainer",
                          "Choose other devices, or another train.run");
    }
    *value = found->get<uint64_t>();
  }
  for (const auto& [key, value] :
       {std::pair{"base_weights", &position.base}, {"base", &position.base_ends}}) {
    const auto found = json.find(key);
    if (found != json.end() && found->is_number_unsigned()) *value = found->get<uint64_t>();
  }
  const auto folder = json.find("folder");
  if (folder != json.end() && folder->is_string()) position.folder = folder->get<std::string>();
  return position;
}

}  // namespace smartinf::train
