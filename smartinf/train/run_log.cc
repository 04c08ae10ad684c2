#include "smartinf/train/run_log.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include "smartinf/train/run_folder.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using nlohmann::json;

namespace {

/// These come first, the others in the order of their names.
constexpr std::array<std::string_view, 9> kFirstColumns{
    "loss",    "validation_loss", "gradient_norm", "lr",       "tokens",
    "seconds", "tokens_per_s",    "exposed_s",     "forward_s"};

/// Names in a line that make it one of measurements.
constexpr std::array<std::string_view, 4> kMeasured{"loss", "validation_loss", "evaluation_loss",
                                                    "layers"};

void flatten(const json& object, const std::string& prefix, json& out) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_object()) {
      flatten(value, prefix + name + "/", out);
    } else if (!value.is_array()) {
      out[prefix + name] = value;
    }
  }
}

std::string cell(const json& value) {
  if (value.is_null()) return "";
  std::string text = value.is_string() ? value.get<std::string>()
                                       : value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.find_first_of("\",\r\n") == std::string::npos) return text;
  for (size_t at = text.find('"'); at != std::string::npos; at = text.find('"', at + 2)) {
    text.insert(at, 1, '"');
  }
  return '"' + text + '"';
}

}  // namespace

std::string LogRow::to_json() const {
  json line = values;
  line["step"] = step;
  return line.dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<std::vector<LogRow>> read_log(const std::string& folder) {
  const std::string path = folder + "/" + std::string(kLogFile);
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    return Status(ErrorCode::kNotFound, folder + " has no " + std::string(kLogFile),
                  "Name the folder of a run (train.run), e.g. runs/quickstart");
  }
  std::vector<LogRow> rows;
  for_each_line(path, [&](base::StepNumber step, const json& line, const std::string&) {
    const bool measured =
        std::ranges::any_of(kMeasured, [&](std::string_view name) { return line.contains(name); });
    if (!measured) return;
    LogRow& row = rows.emplace_back();
    row.step = step;
    row.begins_step = line.contains("loss");
    row.values = json::object();
    flatten(line, "", row.values);
    row.values.erase("step");
  });
  return rows;
}

std::string log_to_csv(std::span<const LogRow> rows) {
  std::set<std::string> others;
  std::vector<LogRow> steps;
  for (const LogRow& row : rows) {
    for (const auto& [name, value] : row.values.items()) others.insert(name);
    if (row.begins_step || steps.empty() || steps.back().step != row.step) {
      steps.push_back(row);
    } else {
      steps.back().values.update(row.values);
    }
  }
  std::vector<std::string> columns;
  for (const std::string_view name : kFirstColumns) {
    const auto found = others.find(std::string(name));
    if (found != others.end()) columns.push_back(std::move(others.extract(found).value()));
  }
  columns.insert(columns.end(), others.begin(), others.end());

  std::string text = "step";
  for (const std::string& name : columns) text += fmt::format(",{}", cell(name));
  text += "\n";
  for (const LogRow& row : steps) {
    text += std::to_string(row.step);
    for (const std::string& name : columns) {
      const auto found = row.values.find(name);
      text += ",";
      if (found != row.values.end()) text += cell(*found);
    }
    text += "\n";
  }
  return text;
}

}  // namespace smartinf::train
