// smartinf bench scale: seconds of an update against the number of devices, on devices emulated
// over memory behind links of chosen rates, beside the bound that those rates allow: Figure 11 of
// Smart-Infinity (HPCA 2024) on one machine.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "smartinf/base/units.h"
#include "smartinf/csd/link.h"
#include "smartinf/engine/emulated_source.h"
#include "smartinf/engine/gradient_path.h"
#include "smartinf/engine/updater.h"
#include "smartinf/plan/placement.h"
#include "smartinf/sim/update.h"
#include "smartinf/sim/update_json.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/median.h"
#include "apps/smartinf/synthetic_steps.h"
#include "apps/smartinf/trace_file.h"
#include "apps/smartinf/update_rate.h"
#include "apps/smartinf/values_flag.h"

namespace smartinf::apps {
namespace {

using base::DataType;
using base::Status;

/// So many, and filling and draining a device's slots is a small part.
constexpr uint64_t kSubgroupsPerDevice = 48;

struct ScaleOptions {
  std::vector<uint32_t> devices = {1, 2, 4, 6, 8, 10};
  uint64_t params = uint64_t{1} << 24;
  // What the paper's SmartSSDs and its host's path to ten of them were measured at, at one
  // fortieth: 3.0 and 1.6 GB/s, 6.4 GB/s for both directions together.
  std::string internal_read = "75MB";
  std::string internal_write = "40MB";
  std::string host_link = "160MB";
  std::string shared = "all";
  double slow_device = 1;
  std::string format = "f32";
  std::optional<compress::ValueEncoding> values;
  uint64_t subgroups = kSubgroupsPerDevice;
  int repeat = 1;
  std::string trace;
  bool json = false;
};

/// Of compressed gradients.
constexpr double kScaleDensity = 0.08;

struct ScaleScheme {
  const char* key;
  engine::UpdateWhere where;
  plan::ScheduleVariant schedule;
  DataType type;            // of gradients and weights
  bool compressed = false;  // gradients: density 0.08 with error feedback
};

constexpr ScaleScheme kScaleSchemes[] = {
    {"host_update", engine::UpdateWhere::kHost, plan::ScheduleVariant::kOverlapped, DataType::kF32},
    {"naive", engine::UpdateWhere::kDevice, plan::ScheduleVariant::kNaive, DataType::kBf16},
    {"overlapped", engine::UpdateWhere::kDevice, plan::ScheduleVariant::kOverlapped,
     DataType::kBf16},
    {"compressed", engine::UpdateWhere::kDevice, plan::ScheduleVariant::kOverlapped,
     DataType::kBf16, true},
};

class ScaleBench {
 public:
  explicit ScaleBench(const ScaleOptions& options)
      : options_(options),
        format_(*base::state_format_from_name(options.format)),
        bytes_(state_bytes_per_parameter(kernels::UpdateRule::kAdamW, format_)),
        drives_share_(options.shared != "none"),
        host_shares_(options.shared == "all"),
        compress_(compression(options)),
        packed_bytes_(compressed_bytes_per_parameter(compress_)) {}

  Status run() {
    SI_ASSIGN_OR_RETURN(read_, rate(options_.internal_read));
    SI_ASSIGN_OR_RETURN(write_, rate(options_.internal_write));
    SI_ASSIGN_OR_RETURN(host_, rate(options_.host_link));
    nlohmann::ordered_json rows = nlohmann::json::array();
    if (!options_.json) {
      const auto text = [](uint64_t bytes) {
        return base::format_rate(static_cast<double>(bytes));
      };
      fmt::print("{} parameters; drives {} read, {} written, {}; host link {}, {}\n\n",
                 options_.params, text(read_), text(write_),
                 drives_share_ ? "one at a time" : "both at once", text(host_),
                 host_shares_ ? "both directions together" : "each way");
      fmt::print("{:>7}  {:>40}  {:>40}  {:>40}  {:>40}\n", "devices", "host update", "naive",
                 "overlapped", "compressed");
    }
    for (const uint32_t devices : options_.devices) {
      nlohmann::ordered_json row = {{"devices", devices}, {"params", options_.params}};
      std::string line = fmt::format("{:>7}", devices);
      for (const ScaleScheme& scheme : kScaleSchemes) {
        say(fmt::format("timing {} device{}: {}", devices, devices == 1 ? "" : "s", scheme.key));
        SI_ASSIGN_OR_RETURN(const Measured measured, measure(scheme, devices));
        const auto& [seconds, slots] = measured;
        SI_ASSIGN_OR_RETURN(const double bound_s, bound(scheme, devices));
        SI_ASSIGN_OR_RETURN(const auto shape, simulated_shape(scheme, devices, slots));
        std::optional<double> simulated_s;
        if (shape) {
          SI_ASSIGN_OR_RETURN(const sim::UpdateTimes times, sim::simulate_update(*shape));
          simulated_s = times.total_s();
        }
        const std::string key = scheme.key;
        row[key + "_s"] = median(seconds);
        row[key + "_s_min"] = *std::min_element(seconds.begin(), seconds.end());
        row[key + "_s_max"] = *std::max_element(seconds.begin(), seconds.end());
        row[key + "_bound_s"] = bound_s;
        row[key + "_ratio"] = median(seconds) / bound_s;
        row[key + "_slots"] = slots;
        if (simulated_s) {
          row[key + "_simulated_s"] = *simulated_s;
          row[key + "_simulated_ratio"] = *simulated_s / median(seconds);
          row[key + "_shape"] = nlohmann::json(*shape);
        }
        if (options_.json) continue;
        line +=
            fmt::format("  {:>8.3f} s = {:4.2f} bound", median(seconds), median(seconds) / bound_s);
        line += fmt::format(", simulated {:>8}",
                            simulated_s ? fmt::format("{:.3f} s", *simulated_s) : "-");
      }
      rows.push_back(row);
      say("");
      if (!options_.json) fmt::print("{}\n", line);
      std::fflush(stdout);
    }
    if (options_.json) {
      const nlohmann::ordered_json result = {
          {"params", options_.params},
          {"internal_read_bytes_per_s", read_},
          {"internal_write_bytes_per_s", write_},
          {"host_link_bytes_per_s", host_},
          {"shared", options_.shared},
          {"slow_device", options_.slow_device},
          {"state_format", options_.format},
          {"subgroups_per_device", options_.subgroups},
          {"repeat", options_.repeat},
          {"density", compress_.density},
          {"values", compress::value_encoding_name(compress_.values)},
          {"rows", rows}};
      fmt::print("{}\n", result.dump());
    }
    return Status();
  }

 private:
  /// What is being timed, on a terminal; the next call writes over it.
  static void say(const std::string& doing) {
    if (isatty(STDERR_FILENO) == 0) return;
    fmt::print(stderr, "\r\x1b[K{}", doing);
    std::fflush(stderr);
  }

  static base::Result<uint64_t> rate(const std::string& text) {
    SI_ASSIGN_OR_RETURN(const uint64_t bytes, base::parse_bytes(text));
    if (bytes > 0) return bytes;
    return Status(base::ErrorCode::kInvalidArgument, "a link has the rate 0",
                  "Give bytes per second, e.g. 80MB.");
  }

  static compress::CompressOptions compression(const ScaleOptions& options) {
    compress::CompressOptions compress;
    compress.density = kScaleDensity;
    compress.residual_every = 0;
    compress.values = options.values.value_or(compress.default_values());
    return compress;
  }

  /// Of a compressed gradient, per parameter: every subgroup has factors of its own.
  double compressed_bytes(uint32_t devices) const {
    const plan::ParameterSpace parameters = space();
    const auto matrices = compress::matrix_layouts(parameters);
    uint64_t factors = 0;
    for (const plan::Subgroup& subgroup : parameters.subgroups(subgroup_elements(devices))) {
      factors += compress::factors_bytes(matrices, subgroup.first, subgroup.count);
    }
    return packed_bytes_ + static_cast<double>(factors) / static_cast<double>(options_.params);
  }

  uint64_t subgroup_elements(uint32_t devices) const {
    return base::round_up(base::divide_up(options_.params, devices * options_.subgroups),
                          base::kBlockElements);
  }
  /// Of device d's drive, where 1 is the speed given.
  double speed(uint32_t d) const { return d == 0 ? options_.slow_device : 1; }

  engine::UpdaterOptions updater_options(const ScaleScheme& scheme, uint32_t devices) const {
    engine::UpdaterOptions options;
    for (uint32_t d = 0; d < devices; ++d) {
      engine::DeviceOptions device;
      device.path = fmt::format("device {}", d);
      device.threads = 1;
      device.bandwidth = speed(d);
      options.devices.push_back(device);
    }
    options.where = scheme.where;
    options.schedule = scheme.schedule;
    options.gradient_type = scheme.type;
    if (scheme.compressed) options.compress = compress_;
    options.format = format_;
    options.checksums = false;  // two cores stand for all devices' processors
    options.subgroup_elements = subgroup_elements(devices);
    options.io_bytes = base::kMiB / 4;
    options.io_depth = 8;
    if (scheme.where == engine::UpdateWhere::kHost) options.gradient_budget_bytes = 0;
    return options;
  }

  /// What the links allow if everything on them overlaps. An update needs all gradients, for the
  /// norm; so theirs is time before it, for every scheme.
  base::Result<double> bound(const ScaleScheme& scheme, uint32_t devices) const {
    const auto steps_space = space();
    const auto subgroups = steps_space.subgroups(subgroup_elements(devices));
    std::vector<plan::DeviceCapacity> capacities(devices);
    for (uint32_t d = 0; d < devices; ++d) capacities[d].bandwidth = speed(d);
    SI_ASSIGN_OR_RETURN(const auto owner, plan::place(subgroups, capacities));
    std::vector<double> elements(devices, 0);
    for (size_t i = 0; i < owner.size(); ++i) {
      elements[owner[i].value] += static_cast<double>(subgroups[i].count);
    }
    const double state = bytes_.master + bytes_.moments;
    const auto both = [](bool share, double one, double other) {
      return share ? one + other : std::max(one, other);
    };
    // Bytes per parameter; drives work side by side, the host link is one for all.
    const auto drives = [&](double read, double written) {
      double slowest = 0;
      for (uint32_t d = 0; d < devices; ++d) {
        const double seconds = both(drives_share_, read / static_cast<double>(read_),
                                    written / static_cast<double>(write_));
        slowest = std::max(slowest, elements[d] * seconds / speed(d));
      }
      return slowest;
    };
    const auto host = [&](double up, double down) {
      return static_cast<double>(options_.params) * both(host_shares_, up, down) /
             static_cast<double>(host_);
    };
    if (scheme.where == engine::UpdateWhere::kHost) {
      // fp32 gradients are written, then read again beside the state; all of it crosses the link.
      return std::max(drives(0, 4), host(0, 4)) +
             std::max(drives(state + 4, state), host(state + 4, state));
    }
    return host(0, scheme.compressed ? compressed_bytes(devices) : 2) +
           std::max(drives(state, state), host(2, 0));
  }

  /// The same update on the virtual clock; nothing with unequal devices.
  base::Result<std::optional<sim::UpdateShape>> simulated_shape(const ScaleScheme& scheme,
                                                                uint32_t devices, uint32_t slots) {
    if (options_.slow_device != 1) return std::optional<sim::UpdateShape>();
    const bool host = scheme.where == engine::UpdateWhere::kHost;
    sim::UpdateShape shape;
    shape.parameters = options_.params;
    shape.devices = devices;
    shape.subgroup_elements = subgroup_elements(devices);
    shape.slots = slots;
    shape.schedule = scheme.schedule;
    shape.master = bytes_.master;
    shape.moments = bytes_.moments;
    shape.gradient = shape.weight = static_cast<double>(base::data_type_bytes(scheme.type));
    if (scheme.compressed) shape.gradient = compressed_bytes(devices);
    shape.host_update = shape.gradient_spilled = host;
    shape.drive_read_bytes_per_s = static_cast<double>(read_);
    shape.drive_write_bytes_per_s = static_cast<double>(write_);
    shape.shared_budget = drives_share_;
    shape.host_up_bytes_per_s = shape.host_down_bytes_per_s = static_cast<double>(host_);
    shape.host_shared_budget = host_shares_;
    shape.link_catch_up_s = std::chrono::duration<double>(csd::Link::kCatchUp).count();
    shape.links_in_order = true;
    SI_ASSIGN_OR_RETURN(const Rates rates, measured_rates(scheme, devices));
    shape.update_params_per_s = rates.update;
    shape.copy_bytes_per_s = rates.copy;
    shape.gradient_params_per_s = rates.gradient;
    shape.select_params_per_s = rates.select.params_per_s;
    shape.select_threads = rates.select.threads;
    return std::optional<sim::UpdateShape>(shape);
  }
  /// Parameters per second of this machine's cores.
  struct Rates {
    double update = 0;  // of all processors: one thread for each device, as many as there are cores
    double copy = 0;    // bytes: the drives are memory
    double gradient = 0;
    SelectRate select;
  };
  base::Result<Rates> measured_rates(const ScaleScheme& scheme, uint32_t devices) {
    const uint32_t threads = std::min(devices, std::max(1u, std::thread::hardware_concurrency()));
    const auto known = rates_.find({&scheme, threads});
    if (known != rates_.end()) return known->second;
    Rates rates;
    ProcessorWork work{format_, false};
    if (scheme.compressed) work.compress = compress_;
    SI_ASSIGN_OR_RETURN(rates.update, measure_update_rate(work, threads));
    SI_ASSIGN_OR_RETURN(rates.copy, measure_copy_rate(threads));
    // The host update's gradients are spilled: one thread hands them over.
    const uint32_t gradient_threads =
        scheme.where == engine::UpdateWhere::kHost ? 1 : engine::gradient_threads();
    SI_ASSIGN_OR_RETURN(rates.gradient, measure_gradient_rate(scheme.type, gradient_threads));
    if (scheme.compressed) {
      SI_ASSIGN_OR_RETURN(rates.select, measure_select_rate(compress_));
    }
    rates_[{&scheme, threads}] = rates;
    return rates;
  }

  plan::ParameterSpace space() const {
    auto made = synthetic_space(options_.params);
    SI_CHECK(made.ok(), "matrices");
    return *std::move(made);
  }

  /// Drives that are there already: pages are not taken from the system while a step is timed.
  static base::Result<std::vector<std::unique_ptr<csd::EmulatedDrive>>> make_drives(
      uint32_t devices, uint64_t bytes) {
    std::vector<std::unique_ptr<csd::EmulatedDrive>> drives;
    for (uint32_t d = 0; d < devices; ++d) {
      SI_ASSIGN_OR_RETURN(auto drive, csd::EmulatedDrive::create(bytes));
      std::memset(drive->contents().data(), 0, drive->contents().size());
      drives.push_back(std::move(drive));
    }
    return drives;
  }

  struct Measured {
    std::vector<double> seconds;  // of each step
    uint32_t slots = 0;           // of each device
  };
  base::Result<Measured> measure(const ScaleScheme& scheme, uint32_t devices) const {
    engine::UpdaterOptions options = updater_options(scheme, devices);
    // Two copies of the state, spilled gradients, metadata, and room for an uneven share.
    const uint64_t drive_bytes =
        30 * (base::divide_up(options_.params, devices) + 2 * options.subgroup_elements) +
        32 * base::kMiB;
    SI_ASSIGN_OR_RETURN(const auto drives, make_drives(devices, drive_bytes));
    SI_ASSIGN_OR_RETURN(const auto steps,
                        SyntheticSteps::make(options_.params, scheme.type, scheme.type));
    {
      // Without the links, or it would take longer than the step.
      SI_ASSIGN_OR_RETURN(const auto updater,
                          engine::Updater::open(options, steps->space(),
                                                engine::emulated_sources(options, drives)));
      SI_RETURN_IF_ERROR(steps->initialize(*updater));
    }
    for (uint32_t d = 0; d < devices; ++d) {
      const auto scaled = [&](uint64_t rate) {
        return static_cast<uint64_t>(static_cast<double>(rate) * speed(d));
      };
      options.devices[d].internal_link = {scaled(read_), scaled(write_), drives_share_};
    }
    options.host_link = {host_, host_, host_shares_};
    if (!options_.trace.empty()) options.trace = std::make_shared<csd::Trace>();
    Measured measured;
    {
      SI_ASSIGN_OR_RETURN(const auto updater,
                          engine::Updater::open(options, steps->space(),
                                                engine::emulated_sources(options, drives)));
      measured.slots = updater->slots();
      // Not counted: the first step after opening touches memory for the first time.
      SI_RETURN_IF_ERROR(steps->step(*updater).status());
      for (int i = 0; i < options_.repeat; ++i) {
        SI_ASSIGN_OR_RETURN(const StepTimes times, steps->step(*updater));
        measured.seconds.push_back(times.gradient_s + times.update_s);
      }
    }
    if (options.trace != nullptr) SI_RETURN_IF_ERROR(write_trace(options_.trace, *options.trace));
    return measured;
  }

  const ScaleOptions options_;
  const base::StateFormat format_;
  const StateBytes bytes_;
  const bool drives_share_;
  const bool host_shares_;
  const compress::CompressOptions compress_;
  const double packed_bytes_;  // of a parameter's compressed gradient, without factors
  uint64_t read_ = 0;
  uint64_t write_ = 0;
  uint64_t host_ = 0;
  std::map<std::pair<const ScaleScheme*, uint32_t>, Rates> rates_;  // by scheme and threads
};

}  // namespace

void add_bench_scale(CLI::App& bench, Run& run) {
  auto options = std::make_shared<ScaleOptions>();
  CLI::App* command = bench.add_subcommand("scale",
                                           "Time updates on emulated devices of several counts, "
                                           "beside the links' bound and the simulator");
  command->add_option("--devices", options->devices, "Numbers of devices, one row each")
      ->delimiter(',')
      ->check(CLI::Range(1u, 64u))
      ->capture_default_str();
  command->add_option("--params", options->params, "Number of parameters")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 36))
      ->capture_default_str();
  command
      ->add_option("--internal-read", options->internal_read, "Bytes per second that a drive reads")
      ->capture_default_str();
  command
      ->add_option("--internal-write", options->internal_write,
                   "Bytes per second that a drive writes")
      ->capture_default_str();
  command
      ->add_option("--host-link", options->host_link,
                   "Bytes per second of the link between all devices and the host")
      ->capture_default_str();
  command
      ->add_option(
          "--shared", options->shared,
          "Links whose two directions share the link's time: none, the drives', or the drives' "
          "and the host link (all)")
      ->check(CLI::IsMember({"none", "drives", "all"}))
      ->capture_default_str();
  command
      ->add_option("--slow-device", options->slow_device,
                   "Speed of the first device, relative to the others")
      ->check(CLI::Range(0.01, 100.0))
      ->capture_default_str();
  command->add_option("--state-format", options->format, "Format of momentum and variance")
      ->check(CLI::IsMember(base::enum_name_list<base::StateFormat>()))
      ->capture_default_str();
  add_values_flag(*command, options->values, "sign");
  command
      ->add_option("--subgroups", options->subgroups,
                   "Subgroups of each device; with few, filling and draining the pipeline takes a "
                   "visible part")
      ->check(CLI::Range(uint64_t{1}, uint64_t{4096}))
      ->capture_default_str();
  command
      ->add_option("--repeat", options->repeat, "Number of steps, of which the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command
      ->add_option("--trace", options->trace,
                   "Chrome trace of the last scheme's steps to write (ui.perfetto.dev)")
      ->type_name("FILE");
  command->add_flag("--json", options->json,
                    "Print one JSON object with a row for each number of devices");
  command->footer(
      "Examples:\n"
      "  smartinf bench scale --json > scale.json; python3 bench/plot_scale.py scale.json\n"
      "  smartinf bench scale --devices 1,2,4,6,8,10 --internal-read 75MB --internal-write 40MB "
      "--host-link 160MB\n"
      "  smartinf bench scale --devices 4 --slow-device 0.5    # placement in proportion");
  command->callback([options, &run] {
    run = [options] {
      const Status status = ScaleBench(*options).run();
      return status.ok() ? kExitDone : report(status);
    };
  });
}

}  // namespace smartinf::apps
