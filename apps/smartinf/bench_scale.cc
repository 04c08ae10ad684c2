// smartinf bench scale: seconds of an update against the number of devices, on devices emulated
// over memory behind links of chosen rates, beside the bound that those rates allow: Figure 11 of
// Smart-Infinity (HPCA 2024) on one machine.
#include <algorithm>
#include <cstdio>
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

struct ScaleOptions {
  std::vector<uint32_t> devices = {1, 2, 4, 6, 8, 10};
  std::string params = "16777216";
  // A SmartSSD's drive and the link of ten of them to the host, at one fortieth.
  std::string internal_read = "80MB";
  std::string internal_write = "42.5MB";
  std::string host_link = "400MB";
  bool shared_budget = false;
  std::string scratch;
  bool json = false;
};

struct Rates {
  double read = 0;
  double write = 0;
  double host = 0;
};

struct Scheme {
  const char* key;
  engine::UpdateWhere where;
  plan::ScheduleVariant schedule;
  DataType type;  // of gradients and weights
};

constexpr Scheme kSchemes[] = {
    {"host_update", engine::UpdateWhere::kHost, plan::ScheduleVariant::kOverlapped, DataType::kF32},
    {"naive", engine::UpdateWhere::kDevice, plan::ScheduleVariant::kNaive, DataType::kBf16},
    {"overlapped", engine::UpdateWhere::kDevice, plan::ScheduleVariant::kOverlapped,
     DataType::kBf16},
};

/// Every device gets so many subgroups, so that filling and draining its slots is a small part.
constexpr uint64_t kSubgroupsPerDevice = 48;

class ScaleBench {
 public:
  explicit ScaleBench(const ScaleOptions& options) : options_(options) {}

  Status run() {
    SI_ASSIGN_OR_RETURN(params_, base::parse_bytes(options_.params));
    SI_ASSIGN_OR_RETURN(rates_.read, rate(options_.internal_read));
    SI_ASSIGN_OR_RETURN(rates_.write, rate(options_.internal_write));
    SI_ASSIGN_OR_RETURN(rates_.host, rate(options_.host_link));
    nlohmann::ordered_json rows = nlohmann::json::array();
    if (!options_.json) {
      fmt::print("{} parameters; drives {} + {}, host link {} each way\n\n", params_,
                 base::format_rate(rates_.read), base::format_rate(rates_.write),
                 base::format_rate(rates_.host));
      fmt::print("{:>7}  {:>22}  {:>22}  {:>22}\n", "devices", "host update", "naive",
                 "overlapped");
    }
    for (const uint32_t devices : options_.devices) {
      nlohmann::ordered_json row = {{"devices", devices}, {"params", params_}};
      if (!options_.json) fmt::print("{:>7}", devices);
      for (const Scheme& scheme : kSchemes) {
        SI_ASSIGN_OR_RETURN(const double seconds, measure(scheme, devices));
        const double bound_s = bound(scheme, devices);
        const std::string key = scheme.key;
        row[key + "_s"] = seconds;
        row[key + "_bound_s"] = bound_s;
        row[key + "_ratio"] = seconds / bound_s;
        if (options_.json) continue;
        fmt::print("  {:>8.3f} s = {:4.2f} bound", seconds, seconds / bound_s);
        std::fflush(stdout);
      }
      rows.push_back(row);
      if (!options_.json) fmt::print("\n");
    }
    if (options_.json) {
      const nlohmann::ordered_json result = {{"params", params_},
                                             {"internal_read_bytes_per_s", rates_.read},
                                             {"internal_write_bytes_per_s", rates_.write},
                                             {"host_link_bytes_per_s", rates_.host},
                                             {"shared_budget", options_.shared_budget},
                                             {"rows", rows}};
      fmt::print("{}\n", result.dump());
    }
    return Status();
  }

 private:
  static base::Result<double> rate(const std::string& text) {
    SI_ASSIGN_OR_RETURN(const uint64_t bytes, base::parse_bytes(text));
    if (bytes == 0) {
      return Status(base::ErrorCode::kInvalidArgument, "a link has the rate 0",
                    "Give bytes per second, e.g. 80MB.");
    }
    return static_cast<double>(bytes);
  }

  uint64_t subgroup_elements(uint32_t devices) const {
    return base::round_up(base::divide_up(params_, devices * kSubgroupsPerDevice),
                          base::kBlockElements);
  }

  /// What the links allow if everything on them overlaps; the device with most subgroups counts.
  double bound(const Scheme& scheme, uint32_t devices) const {
    const uint64_t subgroup = subgroup_elements(devices);
    const uint64_t subgroups = base::divide_up(params_, subgroup);
    const double all = static_cast<double>(params_);
    const double most =
        std::min(all, static_cast<double>(base::divide_up(subgroups, devices) * subgroup));
    const auto drive = [&](double read, double write) {
      return options_.shared_budget ? most * (read / rates_.read + write / rates_.write)
                                    : most * std::max(read / rates_.read, write / rates_.write);
    };
    if (scheme.where == engine::UpdateWhere::kHost) {
      // fp32 gradients are written and read again; everything crosses the host link.
      return std::max(drive(16, 16), all * 16 / rates_.host);
    }
    // An update needs all gradients, for the norm; so theirs is time before it.
    return all * 2 / rates_.host + std::max(drive(12, 12), all * 2 / rates_.host);
  }

  base::Result<double> measure(const Scheme& scheme, uint32_t devices) {
    SI_ASSIGN_OR_RETURN(const ScratchDirectory scratch, ScratchDirectory::make(options_.scratch));
    engine::UpdaterOptions options;
    for (uint32_t d = 0; d < devices; ++d) {
      engine::DeviceOptions device;
      device.path = scratch / fmt::format("device{}", d);
      device.bandwidth = 1;
      device.threads = 1;
      options.devices.push_back(device);
    }
    options.where = scheme.where;
    options.schedule = scheme.schedule;
    options.gradient_type = scheme.type;
    options.checksums = false;  // two cores stand for all devices' processors
    options.subgroup_elements = subgroup_elements(devices);
    options.io_bytes = base::kMiB / 4;
    options.io_depth = 8;
    if (scheme.where == engine::UpdateWhere::kHost) options.gradient_budget_bytes = 0;
    SI_ASSIGN_OR_RETURN(const auto steps, SyntheticSteps::make(params_, scheme.type, scheme.type));
    {
      // Without the links, or it would take longer than the step.
      SI_ASSIGN_OR_RETURN(const auto updater, engine::Updater::open(options, steps->space()));
      SI_RETURN_IF_ERROR(steps->initialize(*updater));
    }
    for (engine::DeviceOptions& device : options.devices) {
      device.internal_link = {rates_.read, rates_.write, options_.shared_budget};
    }
    options.host_link = {rates_.host, rates_.host, false};
    SI_ASSIGN_OR_RETURN(const auto updater, engine::Updater::open(options, steps->space()));
    SI_ASSIGN_OR_RETURN(const StepTimes times, steps->step(*updater));
    return times.gradient_s + times.update_s;
  }

  const ScaleOptions options_;
  uint64_t params_ = 0;
  Rates rates_;
};

}  // namespace

void add_bench_scale(CLI::App& bench, Run& run) {
  auto options = std::make_shared<ScaleOptions>();
  CLI::App* command = bench.add_subcommand(
      "scale", "Times updates on emulated devices against their number and the links' bound");
  command->add_option("--devices", options->devices, "Counts of devices")
      ->delimiter(',')
      ->check(CLI::Range(1u, 64u))
      ->capture_default_str();
  command->add_option("--params", options->params, "Parameters")->capture_default_str();
  command->add_option("--internal-read", options->internal_read, "A drive's reads, per second")
      ->capture_default_str();
  command->add_option("--internal-write", options->internal_write, "A drive's writes, per second")
      ->capture_default_str();
  command->add_option("--host-link", options->host_link, "All devices' link, each way, per second")
      ->capture_default_str();
  command->add_flag("--shared-budget", options->shared_budget,
                    "A drive's reads and writes draw on one budget of time");
  command->add_option("--scratch", options->scratch, "Where the state goes (default: memory)");
  command->add_flag("--json", options->json, "A JSON object with one row for each count");
  command->footer(
      "Example:\n"
      "  smartinf bench scale --devices 1,2,4,6,8,10 --internal-read 80MB --internal-write 42.5MB "
      "--host-link 400MB --json");
  command->callback([options, &run] {
    run = [options] {
      const Status status = ScaleBench(*options).run();
      return status.ok() ? kExitDone : report(status);
    };
  });
}

}  // namespace smartinf::apps
