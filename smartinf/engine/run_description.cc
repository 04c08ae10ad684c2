#include "smartinf/engine/run_description.h"

#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"

namespace smartinf::engine {

std::string to_json(const RunDescription& description) {
  return nlohmann::json{{"space", nlohmann::json::parse(description.space.to_json())},
                        {"rule", kernels::update_rule_name(description.rule)},
                        {"devices", description.devices}}
      .dump();
}

base::Result<RunDescription> run_description_from_json(std::string_view text) {
  const auto corrupt = [](std::string what) {
    return base::Status(base::ErrorCode::kCorrupt, "run description: " + std::move(what),
                        "The device's metadata is damaged; run smartinf fsck on it.");
  };
  const nlohmann::json json = base::parse_json(text);
  if (!json.is_object() || !json.contains("space") || !json.contains("rule") ||
      !json["rule"].is_string()) {
    return corrupt("it has no parameter space or no rule");
  }
  RunDescription description;
  SI_ASSIGN_OR_RETURN(description.space, plan::ParameterSpace::from_json(json["space"].dump()));
  const auto rule = kernels::update_rule_from_name(json["rule"].get<std::string>());
  if (!rule) return corrupt("unknown rule " + json["rule"].get<std::string>());
  description.rule = *rule;
  if (json.contains("devices") && json["devices"].is_array()) {
    for (const nlohmann::json& name : json["devices"]) {
      if (!name.is_string() || !base::printable(name.get<std::string>())) {
        return corrupt("a device name is not text");
      }
      description.devices.push_back(name.get<std::string>());
    }
  }
  return description;
}

}  // namespace smartinf::engine
