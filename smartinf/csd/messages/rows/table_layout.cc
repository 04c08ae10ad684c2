#include "smartinf/csd/messages/rows/table_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/codec.h"
#include "smartinf/base/row_pages.h"
#include "smartinf/base/text.h"
#include "smartinf/csd/describe.h"

namespace smartinf::csd {

using base::ErrorCode;
using base::Result;
using base::Status;
using storage::RowTableKind;

namespace {

// Scalars of a step, encoded, in the table that keeps those of all steps.
constexpr uint32_t kStepRecordBytes = 128;
constexpr uint64_t kStepsAtOnce = 4096;

Result<kernels::RowScalars> decode_step(std::span<const std::byte> record) {
  uint8_t there = 0;
  kernels::RowScalars scalars;
  base::Decoder decoder(record);
  decoder(there, scalars);
  if (decoder.ok() && there == 1) return scalars;
  return Status(ErrorCode::kCorrupt, "the scalars of an earlier step are damaged",
                "Run smartinf fsck on the device.");
}

}  // namespace

std::string to_json(const RunTables& tables) {
  nlohmann::json list = nlohmann::json::array();
  for (const TableShape& table : tables.tables) {
    list.push_back({{"name", table.name},
                    {"kind", base::enum_name(table.kind)},
                    {"rule", kernels::row_rule_name(table.rule)},
                    {"rows", table.rows},
                    {"dim", table.dim},
                    {"deviation", table.start.deviation},
                    {"seed", table.start.seed}});
  }
  return nlohmann::json{{"tables", std::move(list)}, {"chunks", tables.chunks}}.dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result<RunTables> run_tables_from_json(std::string_view text) {
  const Status corrupt(ErrorCode::kCorrupt, "the description of the tables cannot be read",
                       "Use the program that made them, or run smartinf fsck on the device.");
  const nlohmann::json json = base::parse_json(text);
  try {
    RunTables made;
    for (const nlohmann::json& one : json.at("tables")) {
      TableShape& table = made.tables.emplace_back();
      const auto kind = base::enum_from_name<RowTableKind>(one.at("kind").get<std::string>());
      const auto rule = kernels::row_rule_from_name(one.at("rule").get<std::string>());
      if (!kind || !rule) return corrupt;
      table.name = one.at("name").get<std::string>();
      table.kind = *kind;
      table.rule = *rule;
      table.rows = one.at("rows").get<uint64_t>();
      table.dim = one.at("dim").get<uint32_t>();
      table.start = {one.at("deviation").get<double>(), one.at("seed").get<uint64_t>()};
    }
    made.chunks = json.at("chunks").get<std::vector<uint8_t>>();
    const auto shaped = [](const TableShape& table) { return table.rows > 0 && table.dim > 0; };
    if (made.chunks.empty() || !std::ranges::all_of(made.tables, shaped)) return corrupt;
    return made;
  } catch (const nlohmann::json::exception&) {
    return corrupt;
  }
}

std::string text_of(const TableShape& table) {
  std::string text = fmt::format("{}: {} rows of {}, {}", table.name, table.rows, table.dim,
                                 base::enum_name(table.kind));
  if (table.kind != RowTableKind::kState) return text;
  text += fmt::format(", {}", kernels::row_rule_name(table.rule));
  if (table.start.deviation == 0) return text;
  return text + fmt::format(", random with deviation {} and seed {}", table.start.deviation,
                            table.start.seed);
}

std::string text_of(const RunTables& tables) {
  std::string text;
  for (const TableShape& table : tables.tables) text += text_of(table) + "; ";
  text += "chunks of rows on devices";
  for (const uint8_t device : tables.chunks) text += fmt::format(" {}", device);
  return text;
}

Result<DeviceTables> device_tables(const RunTables& tables, const storage::RunId& run,
                                   uint32_t device_index, uint32_t device_count,
                                   uint64_t log_bytes) {
  DeviceTables made;
  made.layout.run = run;
  made.layout.device_index = device_index;
  made.layout.device_count = device_count;
  made.layout.log_bytes = log_bytes;
  made.layout.description = to_json(tables);
  for (const TableShape& shape : tables.tables) {
    SI_ASSIGN_OR_RETURN(auto placement,
                        plan::RowPlacement::make(shape.rows, tables.chunks,
                                                 base::records_per_page(shape.record_bytes())));
    made.layout.tables.push_back({shape.name, shape.kind,
                                  static_cast<uint32_t>(shape.record_bytes()),
                                  placement.rows_on(device_index)});
    made.placements.push_back(std::move(placement));
  }
  for (const TableShape& shape : tables.tables) {
    made.steps_tables.push_back(
        shape.catches_up() ? static_cast<uint32_t>(made.layout.tables.size()) : 0);
    if (!shape.catches_up()) continue;
    made.layout.tables.push_back(
        {shape.name + " (steps)", RowTableKind::kState, kStepRecordBytes, kStepsMax});
  }
  return made;
}

/// A 1, which no record that was never written has, comes first.
std::vector<std::byte> encode_step(const kernels::RowScalars& scalars) {
  base::Encoder encoder;
  encoder(uint8_t{1}, scalars);
  std::vector<std::byte> bytes = encoder.take();
  SI_CHECK(bytes.size() <= kStepRecordBytes, "the scalars of a step do not fit their record");
  bytes.resize(kStepRecordBytes);
  return bytes;
}

Result<std::vector<kernels::RowScalars>> read_steps(const ReadRows& read) {
  std::vector<kernels::RowScalars> steps;
  std::vector<uint32_t> rows(kStepsAtOnce);
  for (uint64_t first = 0; first < kStepsMax; first += kStepsAtOnce) {
    std::iota(rows.begin(), rows.end(), static_cast<uint32_t>(first));
    Status bad;
    SI_RETURN_IF_ERROR(read(rows, [&](size_t, std::span<const std::byte> record) {
      if (record.empty()) return;
      Result<kernels::RowScalars> scalars = decode_step(record);
      if (scalars.ok()) {
        steps.push_back(*scalars);
      } else {
        bad = scalars.status();
      }
    }));
    SI_RETURN_IF_ERROR(bad);
  }
  std::ranges::sort(steps, {}, step_of);
  return steps;
}

void bring_up(std::span<const kernels::RowScalars> steps, std::span<std::byte> record) {
  if (steps.empty()) return;
  const base::StepNumber from = kernels::record_step(record);
  // A row that was never updated has no momentum that would move it.
  if (from == 0) return;
  const auto missed = std::ranges::upper_bound(steps, from, {}, step_of);
  kernels::catch_up(steps.subspan(static_cast<size_t>(missed - steps.begin())), record);
}

}  // namespace smartinf::csd
