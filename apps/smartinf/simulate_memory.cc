// `smartinf simulate memory`: how fast a card's or a host's DRAM serves streams, random bursts,
// rows of a table and the selected elements of a gradient, and what gather and scatter in its banks
// gain.
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/sim/dram/checker.h"
#include "smartinf/sim/dram/energy.h"
#include "smartinf/sim/dram/traffic.h"

#include "apps/smartinf/commands.h"

namespace smartinf::apps {
namespace {

using nlohmann::ordered_json;
namespace dram = sim::dram;

struct MemoryFlags {
  std::string memory = "ddr4-2400-x8";
  dram::Traffic traffic;
  bool check = false;
  bool list = false;
  bool print_memory = false;
  bool json = false;
};

double seconds_of(const dram::Config& config, const dram::Counts& counts) {
  return static_cast<double>(counts.total_cycles()) / config.organisation.clock_hz;
}

/// Of all channels, which share the requests evenly.
double bytes_per_s(const dram::Config& config, const dram::Counts& counts) {
  return config.organisation.channels * static_cast<double>(counts.used_bytes) /
         seconds_of(config, counts);
}

void add_counts(ordered_json& row, const std::string& prefix, const dram::Config& config,
                const dram::Counts& counts) {
  row[prefix + "seconds"] = seconds_of(config, counts);
  row[prefix + "bytes_per_s"] = bytes_per_s(config, counts);
  row[prefix + "between_refreshes_bytes_per_s"] =
      bytes_per_s(config, counts) / (1 - counts.share(dram::Cause::kRefresh));
  row[prefix + "used_bytes"] = counts.used_bytes;
  row[prefix + "bus_bytes"] = counts.bus_bytes;
  row[prefix + "used_share"] = counts.used_share();
  row[prefix + "row_hits"] = counts.row_hits;
  for (size_t i = 0; i < dram::kCauses; ++i) {
    const auto cause = static_cast<dram::Cause>(i);
    row[fmt::format("{}{}_share", prefix, base::enum_name(cause))] = counts.share(cause);
  }
  for (size_t i = 0; i < dram::kCommands; ++i) {
    const auto command = static_cast<dram::Command>(i);
    row[fmt::format("{}{}_commands", prefix, base::enum_name(command))] = counts.count(command);
  }
  const dram::EnergyUse energy = dram::energy_of(config, counts);
  row[prefix + "joules"] = config.organisation.channels * energy.total();
  for (size_t i = 0; energy.total() > 0 && i < dram::kEnergyNames.size(); ++i) {
    row[fmt::format("{}{}_energy_share", prefix, dram::kEnergyNames[i])] =
        energy.joules[i] / energy.total();
  }
}

void print_counts(const char* name, const dram::Config& config, const dram::Counts& counts) {
  std::string waits;
  for (size_t i = 1; i < dram::kCauses; ++i) {
    const auto cause = static_cast<dram::Cause>(i);
    if (counts.share(cause) < 0.001) continue;
    waits += fmt::format(", {} {:.1f} %", base::enum_name(cause), 100 * counts.share(cause));
  }
  fmt::print("  {:<8} {:>10}  {}/s, of the bytes on the bus {:.1f} % used\n", name,
             base::format_seconds(seconds_of(config, counts)),
             base::format_bytes(static_cast<uint64_t>(bytes_per_s(config, counts))),
             100 * counts.used_share());
  fmt::print("           bus: data {:.1f} %{}\n", 100 * counts.share(dram::Cause::kData), waits);
  const dram::EnergyUse energy = dram::energy_of(config, counts);
  if (energy.total() == 0) return;
  std::string shares;
  for (size_t i = 0; i < dram::kEnergyNames.size(); ++i) {
    const double share = energy.joules[i] / energy.total();
    if (share >= 0.001) shares += fmt::format(", {} {:.1f} %", dram::kEnergyNames[i], 100 * share);
  }
  fmt::print("           energy: {:.3g} mJ{}\n",
             1e3 * config.organisation.channels * energy.total(), shares);
}

int run_memory(const MemoryFlags& flags) {
  if (flags.list) {
    fmt::print("memories: {}\n", fmt::join(dram::preset_names(), " "));
    return kExitDone;
  }
  const auto config = dram::load_config(flags.memory);
  if (!config.ok()) return report(config.status(), kExitUsage);
  if (flags.print_memory) {
    fmt::print("{}", dram::config_to_toml(*config));
    return kExitDone;
  }
  dram::Traffic traffic = flags.traffic;
  if (const base::Status status = dram::check_traffic(*config, traffic); !status.ok()) {
    return report(status, kExitUsage);
  }
  const uint64_t channels = config->organisation.channels;
  traffic.requests = (traffic.requests + channels - 1) / channels;
  if (traffic.pattern == dram::Pattern::kRows) {
    traffic.table_rows = (traffic.table_rows + channels - 1) / channels;
  }
  const bool collects =
      traffic.pattern != dram::Pattern::kStream && traffic.pattern != dram::Pattern::kRandom;
  ordered_json row = {{"memory", config->name},
                      {"source", config->source},
                      {"pattern", base::enum_name(traffic.pattern)},
                      {"requests", flags.traffic.requests},
                      {"channels", channels},
                      {"peak_bytes_per_s",
                       static_cast<double>(channels) * config->organisation.peak_bytes_per_s()}};
  if (!flags.json) {
    fmt::print("{} requests of pattern {} on {}, peak {}/s\n", flags.traffic.requests,
               base::enum_name(traffic.pattern), config->name,
               base::format_bytes(row["peak_bytes_per_s"].get<uint64_t>()));
  }
  double plain_s = 0;
  for (const bool in_bank : {false, true}) {
    if (in_bank && !collects) break;
    std::vector<dram::IssuedCommand> trace;
    const dram::Counts counts =
        dram::simulate_traffic(*config, traffic, in_bank, flags.check ? &trace : nullptr);
    if (flags.check) {
      const base::Status status = dram::check_commands(*config, trace);
      if (!status.ok()) return report(status);
    }
    const std::string prefix = in_bank ? "in_bank_" : "";
    add_counts(row, prefix, *config, counts);
    if (!flags.json) print_counts(in_bank ? "in bank" : "plain", *config, counts);
    const double seconds = seconds_of(*config, counts);
    if (in_bank) {
      row["gain"] = plain_s / seconds;
      if (!flags.json) {
        fmt::print("  gather and scatter in the banks: {:.2f} times as fast\n", plain_s / seconds);
      }
    }
    plain_s = seconds;
  }
  if (flags.check) row["checked"] = true;
  if (flags.json) fmt::print("{}\n", row.dump());
  return kExitDone;
}

}  // namespace

void add_simulate_memory(CLI::App& simulate, Run& run) {
  CLI::App* command = simulate.add_subcommand(
      "memory",
      "Predict how fast DRAM serves a pattern of requests, and what gather and scatter "
      "in its banks gain");
  auto flags = std::make_shared<MemoryFlags>();
  dram::Traffic& traffic = flags->traffic;
  command->add_option("--memory", flags->memory, "Preset or .toml file [ddr4-2400-x8]")
      ->type_name("NAME|FILE");
  command
      ->add_option_function<std::string>(
          "--pattern",
          [&traffic](const std::string& name) {
            traffic.pattern = *base::enum_from_name<dram::Pattern>(name);
          },
          "stream, random bursts, words of open rows, rows of a table, or topk: a gradient's "
          "selected elements [stream]")
      ->check(CLI::IsMember(base::enum_name_list<dram::Pattern>()));
  command
      ->add_option("--requests", traffic.requests, "Bursts, words, rows of the table, or elements")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1'000'000'000}))
      ->capture_default_str();
  command->add_flag("--writes", traffic.writes, "Write in place of reading (topk always does)");
  command->add_option("--row-bytes", traffic.row_bytes, "rows: bytes of a row")
      ->check(CLI::Range(1u, 1u << 20))
      ->capture_default_str();
  command
      ->add_option("--table-rows", traffic.table_rows,
                   "rows: of the table, of which --requests are asked for at random")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--share", traffic.share, "topk: share of elements selected")
      ->capture_default_str();
  command->add_option("--banks", traffic.banks, "words: banks that they are in; 0: all")
      ->capture_default_str();
  command
      ->add_option("--words-per-row", traffic.words_per_row,
                   "words: of a DRAM row, before the next one is opened; 0: all of one")
      ->capture_default_str();
  command->add_option("--seed", traffic.seed, "Of random places")->capture_default_str();
  command->add_flag("--check", flags->check,
                    "Hold every command to every constraint of the memory once more");
  command->add_flag("--list", flags->list, "List the known memories");
  command->add_flag("--print-memory", flags->print_memory,
                    "Print the complete memory as a TOML file");
  command->add_flag("--json", flags->json, "Print one flat JSON object");
  command->footer(
      "Examples:\n"
      "  smartinf simulate memory --pattern random\n"
      "  smartinf simulate memory --memory hbm2 --pattern topk --share 0.01\n"
      "  smartinf simulate memory --pattern rows --row-bytes 320 --json");
  command->callback([flags, &run] { run = [flags] { return run_memory(*flags); }; });
}

}  // namespace smartinf::apps
