// `smartinf inspect`: what is on a device.
#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/engine/found_run.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/run_description.h"
#include "smartinf/engine/smallest_state.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/machine.h"
#include "apps/smartinf/remote_flags.h"
#include "apps/smartinf/saved_cache.h"
#include "apps/smartinf/saved_rows.h"
#include "apps/smartinf/state_places.h"
#include "apps/smartinf/wear.h"

namespace smartinf::apps {
namespace {

struct InspectFlags {
  std::vector<std::string> places;
  std::string rated_endurance;
  bool ranges = false;
  bool json = false;
  serve::RemoteOptions remote;
};

// Contents of a device: the store's layout and the engine's description together.
struct Contents {
  std::string device;  // as named
  storage::StoreSummary store;
  std::string owner;  // whose state it is; empty: not known
  DriveFacts drive;
  uint64_t rated_bytes = 0;  // as the user says; 0: not known
  engine::RunDescription run;
  uint64_t elements = 0;      // on this device
  uint64_t subgroup_max = 0;  // elements of the largest subgroup
  bool no_run = false;        // the state is there for what lies beside it
  SavedCache cache;           // keys and values beside the state
  std::string cache_error;    // why they cannot be read
  std::optional<storage::RowFileLayout> tables;  // whose rows are beside the state
  std::string tables_error;
};

base::Result<Contents> read_contents(const std::string& device,
                                     const serve::RemoteOptions& remote) {
  Contents contents;
  contents.device = device;
  const engine::DeviceSources source =
      engine::sources_at({device}, storage::RingKind::kAuto, remote);
  SI_ASSIGN_OR_RETURN(contents.store, source.front()->summarize());
  base::Result<SavedCache> cache = saved_cache(device);
  if (cache.ok()) {
    contents.cache = std::move(*cache);
  } else {
    contents.cache_error = cache.status().to_string();
  }
  auto tables = saved_tables(device);
  if (tables.ok()) {
    contents.tables = std::move(*tables);
  } else {
    contents.tables_error = tables.status().to_string();
  }
  if (const auto found = engine::find_run(source)) {
    contents.owner = owner_text(owner_of(found->client_metadata));
  }
  for (const storage::StoredSubgroup& subgroup : contents.store.layout.subgroups) {
    contents.elements += subgroup.count;
    contents.subgroup_max = std::max(contents.subgroup_max, subgroup.count);
  }
  contents.no_run = engine::is_smallest(contents.store.layout);
  if (contents.store.layout.description.empty() || contents.no_run) return contents;
  SI_ASSIGN_OR_RETURN(contents.run,
                      engine::run_description_from_json(contents.store.layout.description));
  return contents;
}

std::string plane_names(const storage::StoreLayout& layout) {
  std::vector<std::string> names;
  for (const base::PlaneKind kind : layout.planes) {
    names.push_back(fmt::format("{} ({})", base::plane_kind_name(kind),
                                base::encoding_name(base::plane_encoding(layout.format, kind))));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string time_text(uint64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text.data();
}

// How many elements of a range are on this device.
uint64_t elements_here(const storage::StoreLayout& layout, const plan::ParameterRange& range) {
  uint64_t here = 0;
  for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
    const uint64_t first = std::max(subgroup.first_element, range.first);
    const uint64_t end =
        std::min(subgroup.first_element + subgroup.count, range.first + range.count);
    if (first < end) here += end - first;
  }
  return here;
}

void print_line(const char* name, const std::string& value) {
  std::printf("%-16s %s\n", name, value.c_str());
}

void print_cache(const Contents& contents) {
  if (!contents.cache_error.empty()) print_line("keys and values", contents.cache_error);
  const SavedCache& cache = contents.cache;
  if (cache.file == nullptr) return;
  const storage::CacheIdentity& identity = cache.file->identity();
  print_line("keys and values",
             fmt::format("{}; {} in {}, last written {}", cache_text(cache), cache.file->path(),
                         base::format_bytes(cache.file_bytes), time_text(cache.written_seconds)));
  print_line("", fmt::format("{}, job {}, device {} of {} (counted from 0), save {}", identity.text,
                             identity.job.to_string(), identity.device_index, identity.device_count,
                             cache.file->saves()));
  print_line("", fmt::format("{} layers, blocks of {} tokens in {}", identity.layers,
                             identity.block_tokens, base::format_bytes(identity.block_bytes)));
}

void print_tables(const Contents& contents) {
  if (!contents.tables_error.empty()) print_line("tables", contents.tables_error);
  if (!contents.tables) return;
  for (const storage::RowTableLayout& table : contents.tables->tables) {
    print_line(&table == contents.tables->tables.data() ? "tables" : "", table_text(table));
  }
  print_line("", fmt::format("run {}, log of {}, {} in {}", contents.tables->run.to_string(),
                             base::format_bytes(contents.tables->log_bytes),
                             base::format_bytes(storage::RowFile::file_bytes(*contents.tables)),
                             storage::kRowFileName));
}

nlohmann::json tables_to_json(const Contents& contents) {
  if (!contents.tables_error.empty()) return {{"error", contents.tables_error}};
  nlohmann::json tables = nlohmann::json::array();
  for (const storage::RowTableLayout& table : contents.tables->tables) {
    tables.push_back({{"name", table.name},
                      {"kind", storage::kRowTableKindNames[static_cast<size_t>(table.kind)]},
                      {"record_bytes", table.record_bytes},
                      {"rows_here", table.rows}});
  }
  return {{"run", contents.tables->run.to_string()},
          {"log_bytes", contents.tables->log_bytes},
          {"file_bytes", storage::RowFile::file_bytes(*contents.tables)},
          {"tables", tables}};
}

nlohmann::json cache_to_json(const Contents& contents) {
  if (!contents.cache_error.empty()) return {{"error", contents.cache_error}};
  const SavedCache& cache = contents.cache;
  const storage::CacheIdentity& identity = cache.file->identity();
  nlohmann::json sequences = nlohmann::json::array();
  for (const auto& [id, sequence] : cache.file->sequences()) {
    sequences.push_back({{"id", id},
                         {"tokens_max", sequence.tokens_max},
                         {"saved_bytes", cache.file->saved_bytes(sequence)}});
  }
  return {{"file", cache.file->path()},
          {"file_bytes", cache.file_bytes},
          {"job", identity.job.to_string()},
          {"identity", identity.text},
          {"device_index", identity.device_index},
          {"device_count", identity.device_count},
          {"layers", identity.layers},
          {"block_tokens", identity.block_tokens},
          {"block_bytes", identity.block_bytes},
          {"saves", cache.file->saves()},
          {"written_seconds", cache.written_seconds},
          {"tokens", cache.tokens},
          {"saved_bytes", cache.saved_bytes},
          {"sequences", sequences}};
}

void print_contents(const InspectFlags& flags, const Contents& contents) {
  const storage::StoreSummary& store = contents.store;
  const storage::StoreState& state = store.state;
  print_line("device", contents.device);
  print_line("state in",
             fmt::format("{}, {}", store.file_path, base::format_bytes(store.container_bytes)));
  print_line("run",
             fmt::format("{}, device {} of {} (counted from 0), made {}", state.run.to_string(),
                         state.device_index, state.device_count, time_text(store.created_seconds)));
  if (!contents.owner.empty()) print_line("belongs to", contents.owner);
  print_cache(contents);
  print_tables(contents);
  if (store.superblock_copies_damaged > 0) {
    print_line("damage", fmt::format("{} of {} superblock copies; the next steps overwrite them",
                                     store.superblock_copies_damaged, store.superblock_copies));
  }
  if (state.torn) {
    print_line("step", fmt::format("none: {}", storage::kTornState));
  } else if (!state.initialized) {
    print_line("step", state.copied_step == 0
                           ? "none: the creation was interrupted; the next run starts over"
                           : fmt::format("none: a copy of step {} was interrupted; make it again "
                                         "(smartinf restore, smartinf reshard)",
                                         state.copied_step));
    if (store.layout.subgroups.empty()) return;
  } else if (state.prepared_step > state.committed_step) {
    print_line("step",
               fmt::format("{} committed, {} prepared", state.committed_step, state.prepared_step));
  } else {
    print_line("step", fmt::format("{} committed", state.committed_step));
  }
  print_line("format",
             fmt::format("{}: {}; version {}, {}", base::state_format_name(store.layout.format),
                         plane_names(store.layout), store.format_version,
                         store.slots == 2 ? "every step survives a crash (two slots)"
                                          : "not crash-safe (one slot)"));
  print_line("written ever",
             wear_text(store.bytes_written_ever, contents.rated_bytes, contents.drive));
  if (contents.no_run) return print_line("parameters", "none: the state is there for a lock alone");
  const plan::ParameterSpace& space = contents.run.space;
  print_line("parameters",
             fmt::format("{} of the run's {} ({:.1f}%), in {} subgroups of at most {}",
                         contents.elements, space.count(),
                         space.count() == 0 ? 0.0
                                            : 100.0 * static_cast<double>(contents.elements) /
                                                  static_cast<double>(space.count()),
                         store.layout.subgroups.size(), contents.subgroup_max));
  print_line("rule", std::string(kernels::update_rule_name(contents.run.rule)));
  for (size_t i = 0; i < contents.run.devices.size(); ++i) {
    print_line(i == 0 ? "run's devices" : "", contents.run.devices[i]);
  }
  if (!flags.ranges) {
    print_line("ranges", fmt::format("{}; --ranges lists them", space.ranges().size()));
    return;
  }
  std::printf("\n%-40s %-20s %14s %14s\n", "range", "shape", "elements", "here");
  for (const plan::ParameterRange& range : space.ranges()) {
    std::printf("%-40s %-20s %14llu %14llu\n", range.name.c_str(),
                fmt::format("[{}]", fmt::join(range.shape, ", ")).c_str(),
                static_cast<unsigned long long>(range.count),
                static_cast<unsigned long long>(elements_here(store.layout, range)));
  }
}

nlohmann::json to_json(const InspectFlags& flags, const Contents& contents) {
  const storage::StoreSummary& store = contents.store;
  nlohmann::json planes = nlohmann::json::array();
  for (const base::PlaneKind kind : store.layout.planes) {
    planes.push_back(base::plane_kind_name(kind));
  }
  nlohmann::json json{{"device", contents.device},
                      {"file", store.file_path},
                      {"container_bytes", store.container_bytes},
                      {"format_version", store.format_version},
                      {"run", store.state.run.to_string()},
                      {"belongs_to", contents.owner},
                      {"device_index", store.state.device_index},
                      {"device_count", store.state.device_count},
                      {"created_seconds", store.created_seconds},
                      {"initialized", store.state.initialized},
                      {"torn", store.state.torn},
                      {"committed_step", store.state.committed_step},
                      {"prepared_step", store.state.prepared_step},
                      {"slots", store.slots},
                      {"state_format", base::state_format_name(store.layout.format)},
                      {"planes", planes},
                      {"bytes_written_ever", store.bytes_written_ever},
                      {"superblock_copies_damaged", store.superblock_copies_damaged},
                      {"elements", contents.elements},
                      {"subgroups", store.layout.subgroups.size()},
                      {"run_elements", contents.run.space.count()},
                      {"rule", kernels::update_rule_name(contents.run.rule)},
                      {"run_devices", contents.run.devices}};
  if (flags.ranges) {
    nlohmann::json& ranges = json["ranges"] = nlohmann::json::array();
    for (const plan::ParameterRange& range : contents.run.space.ranges()) {
      ranges.push_back({{"name", range.name},
                        {"shape", range.shape},
                        {"first", range.first},
                        {"elements", range.count},
                        {"elements_here", elements_here(store.layout, range)}});
    }
  }
  if (contents.cache.file != nullptr || !contents.cache_error.empty()) {
    json["keys_and_values"] = cache_to_json(contents);
  }
  if (contents.tables || !contents.tables_error.empty()) json["rows"] = tables_to_json(contents);
  if (contents.rated_bytes > 0) json["rated_endurance_bytes"] = contents.rated_bytes;
  if (contents.drive.wear_share) json["drive_wear_share"] = *contents.drive.wear_share;
  if (contents.drive.written_bytes) json["drive_bytes_written"] = *contents.drive.written_bytes;
  return json;
}

int run_inspect(InspectFlags& flags) {
  uint64_t rated_bytes = 0;
  if (!flags.rated_endurance.empty()) {
    const base::Result<uint64_t> rated = base::parse_bytes(flags.rated_endurance);
    if (!rated.ok()) return report(rated.status(), kExitUsage);
    rated_bytes = *rated;
  }
  const base::Result<std::vector<std::string>> devices = devices_of(flags.places, &flags.remote);
  if (!devices.ok()) return report(devices.status());
  nlohmann::json all = nlohmann::json::array();
  int code = kExitDone;
  for (const std::string& device : *devices) {
    base::Result<Contents> contents = read_contents(device, flags.remote);
    if (!contents.ok()) {
      code = report(contents.status());
      continue;
    }
    if (!serve::is_remote(device)) contents->drive = drive_facts(device);
    contents->rated_bytes = rated_bytes;
    if (flags.json) {
      all.push_back(to_json(flags, *contents));
    } else {
      if (device != devices->front()) std::printf("\n");
      print_contents(flags, *contents);
    }
  }
  // One device is one object, as long as it can be read.
  if (flags.json && !(devices->size() == 1 && all.empty())) {
    const nlohmann::json json =
        devices->size() == 1 ? all.front() : nlohmann::json{{"devices", all}};
    std::printf("%s\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  }
  return code;
}

}  // namespace

void add_inspect(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("inspect", "Show what is on a device");
  auto flags = std::make_shared<InspectFlags>();
  command
      ->add_option(
          "device", flags->places,
          "Directories, block devices or devices of other machines, or the folder of a run or a "
          "checkpoint")
      ->required()
      ->type_name("DEVICE...");
  command
      ->add_option(
          "--rated-endurance", flags->rated_endurance,
          "Bytes that may be written to the drive in its lifetime, from its data sheet (600TB)")
      ->type_name("SIZE");
  command->add_flag("--ranges", flags->ranges,
                    "List every parameter and the part of it that is on the device");
  command->add_flag("--json", flags->json, "Print one JSON object");
  add_remote_flags(*command, flags->remote);
  command->footer(
      "Nothing is locked or changed, so a run may be in progress.\n\n"
      "Examples:\n"
      "  smartinf inspect runs/quickstart\n"
      "  smartinf inspect runs/quickstart/state --ranges\n"
      "  smartinf inspect /dev/nvme1n1 --json");
  command->callback([flags, &run] { run = [flags] { return run_inspect(*flags); }; });
}

}  // namespace smartinf::apps
