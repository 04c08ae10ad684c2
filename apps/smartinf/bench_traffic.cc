// smartinf bench traffic: the bytes of one step over the host link, read from the counters, in
// units of M = 2 bytes x parameters: Table I of Smart-Infinity (HPCA 2024).
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/units.h"
#include "smartinf/engine/updater.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/scratch_directory.h"
#include "apps/smartinf/synthetic_steps.h"

namespace smartinf::apps {
namespace {

using base::DataType;
using base::Status;
using base::TrafficKind;

struct TrafficOptions {
  uint64_t params = uint64_t{1} << 23;
  uint32_t devices = 2;
  std::string scratch;
  bool json = false;
};

struct TrafficScheme {
  const char* key;
  const char* title;
  engine::UpdateWhere where;
  DataType type;  // of gradients down and weights up
};

constexpr TrafficScheme kTrafficSchemes[] = {
    {"host_update", "host update, fp32 gradients through storage", engine::UpdateWhere::kHost,
     DataType::kF32},
    {"smartupdate_f32", "SmartUpdate, fp32 both ways", engine::UpdateWhere::kDevice,
     DataType::kF32},
    {"smartupdate_bf16", "SmartUpdate, bf16 both ways", engine::UpdateWhere::kDevice,
     DataType::kBf16},
};

base::Result<base::TrafficReading> measure(const TrafficOptions& options,
                                           const TrafficScheme& scheme) {
  SI_ASSIGN_OR_RETURN(const ScratchDirectory scratch, ScratchDirectory::make(options.scratch));
  engine::UpdaterOptions updater_options;
  for (uint32_t d = 0; d < options.devices; ++d) {
    engine::DeviceOptions device;
    device.path = scratch / fmt::format("device{}", d);
    device.bandwidth = 1;
    updater_options.devices.push_back(device);
  }
  updater_options.where = scheme.where;
  updater_options.gradient_type = scheme.type;
  updater_options.io_bytes = base::kMiB;
  updater_options.io_depth = 4;
  if (scheme.where == engine::UpdateWhere::kHost) updater_options.gradient_budget_bytes = 0;
  SI_ASSIGN_OR_RETURN(const auto steps,
                      SyntheticSteps::make(options.params, scheme.type, scheme.type));
  SI_ASSIGN_OR_RETURN(const auto updater, engine::Updater::open(updater_options, steps->space()));
  SI_RETURN_IF_ERROR(steps->initialize(*updater));
  const base::TrafficReading before = updater->traffic().host_link;
  SI_RETURN_IF_ERROR(steps->step(*updater).status());
  return updater->traffic().host_link.since(before);
}

Status run_traffic(const TrafficOptions& options) {
  const double m_bytes = 2.0 * static_cast<double>(options.params);
  nlohmann::ordered_json row = {{"params", options.params},
                                {"devices", options.devices},
                                {"m_bytes", static_cast<uint64_t>(m_bytes)}};
  if (!options.json) {
    fmt::print("M = {} (2 bytes x {} parameters); over the host link in one step:\n\n",
               base::format_bytes(static_cast<uint64_t>(m_bytes)), options.params);
    fmt::print("{:<46}{:>8}{:>8}{:>8}   metadata\n", "", "up", "down", "sum");
  }
  for (const TrafficScheme& scheme : kTrafficSchemes) {
    SI_ASSIGN_OR_RETURN(const base::TrafficReading moved, measure(options, scheme));
    const uint64_t metadata = moved.up(TrafficKind::kMetadata) + moved.down(TrafficKind::kMetadata);
    const uint64_t up = moved.up_total() - moved.up(TrafficKind::kMetadata);
    const uint64_t down = moved.down_total() - moved.down(TrafficKind::kMetadata);
    const auto in_m = [&](uint64_t bytes) { return static_cast<double>(bytes) / m_bytes; };
    const std::string key = scheme.key;
    row[key + "_m"] = in_m(up + down);
    row[key + "_up_bytes"] = up;
    row[key + "_down_bytes"] = down;
    row[key + "_metadata_bytes"] = metadata;
    if (!options.json) {
      fmt::print("{:<46}{:>7.2f}M{:>7.2f}M{:>7.2f}M   {}\n", scheme.title, in_m(up), in_m(down),
                 in_m(up + down), base::format_bytes(metadata));
    }
  }
  if (options.json) fmt::print("{}\n", row.dump());
  return Status();
}

}  // namespace

void add_bench_traffic(CLI::App& bench, Run& run) {
  auto options = std::make_shared<TrafficOptions>();
  CLI::App* command = bench.add_subcommand(
      "traffic", "Count the bytes of a step over the host link, for each scheme");
  command
      ->add_option("--params", options->params,
                   "Number of parameters; multiples of 65536 give whole numbers")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--devices", options->devices, "Number of devices")
      ->check(CLI::Range(1u, 64u))
      ->capture_default_str();
  command->add_option("--scratch", options->scratch, "Directory for the state [memory]");
  command->add_flag("--json", options->json, "Print one flat JSON object");
  command->footer("Example:\n  smartinf bench traffic --json");
  command->callback([options, &run] {
    run = [options] {
      const Status status = run_traffic(*options);
      return status.ok() ? kExitDone : report(status);
    };
  });
}

}  // namespace smartinf::apps
