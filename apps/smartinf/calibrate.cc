// `smartinf calibrate`: measures this machine and writes a machine file for simulate and plan.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/base/nearest.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/memory.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/serve/options.h"
#include "smartinf/sim/machine.h"
#include "smartinf/storage/tuning.h"
#include "smartinf/train/product_rate.h"

#include "apps/smartinf/busy_cores.h"
#include "apps/smartinf/calibrate_links.h"
#include "apps/smartinf/commands.h"
#include "apps/smartinf/decode_rate.h"
#include "apps/smartinf/loopback_rate.h"
#include "apps/smartinf/machine.h"
#include "apps/smartinf/row_rates.h"
#include "apps/smartinf/update_rate.h"

namespace smartinf::apps {
namespace {

struct CalibrateFlags {
  std::vector<std::string> devices;
  std::string out = "machine.toml";
  std::string gpu;
  std::string name = "this-machine";
  std::string save = "cluster.toml";
  bool links = false;
  bool json = false;
};

/// Refuses a path that may be mistyped: no directory is made for it.
base::Status check_directory(const std::string& path) {
  namespace fs = std::filesystem;
  if (serve::is_remote(path)) {
    return base::Status(
        base::ErrorCode::kUnsupported,
        "--device " + path + " is another machine's, whose drives and cores are measured there",
        "Run smartinf calibrate on the server, and copy the [[device]] of its file into this "
        "machine's, with remote = true, and bytes_per_s in [network].");
  }
  std::error_code error;
  if (fs::is_directory(path, error) || fs::is_block_file(path, error)) return {};
  base::ErrorPlace place;
  place.path = path;
  if (fs::exists(path, error)) {
    return base::Status(base::ErrorCode::kInvalidArgument, "--device is not a directory",
                        "Name a directory on the drive.", std::move(place));
  }
  const fs::path absolute = fs::absolute(path, error).lexically_normal();
  const fs::path whole = absolute.has_filename() ? absolute : absolute.parent_path();
  std::vector<std::string> siblings;
  for (auto entry = fs::directory_iterator(whole.parent_path(), error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code unreadable;
    if (entry->is_directory(unreadable)) siblings.push_back(entry->path().filename().string());
  }
  const std::vector<std::string_view> names(siblings.begin(), siblings.end());
  const std::string wanted = whole.filename().string();
  const std::string_view nearest = base::nearest_name(wanted, names);
  return base::Status(base::ErrorCode::kNotFound, "--device does not exist",
                      nearest.empty() ? "Make it first: a name that was mistyped is not measured."
                                      : fmt::format("Did you mean {}? If not, make it first.",
                                                    (whole.parent_path() / nearest).string()),
                      std::move(place));
}

/// The GPU that nvidia-smi lists first, where its name holds that of a data sheet we have.
std::optional<sim::Gpu> listed_gpu() {
  const GpuFacts facts = gpu_facts();
  if (facts.devices.empty()) return std::nullopt;
  const std::string listed = facts.devices.front();
  const std::string name = listed.substr(0, listed.find(','));
  std::string_view longest;  // "L40S" before "L40"
  for (const std::string_view known : sim::gpu_preset_names()) {
    std::string spaced(known);  // nvidia-smi writes "GeForce RTX 4090"
    if (spaced.starts_with("RTX")) spaced.insert(3, " ");
    if (name.find(spaced) != std::string::npos && known.size() > longest.size()) longest = known;
  }
  if (longest.empty()) return std::nullopt;
  const auto gpu = sim::gpu_preset(longest);
  if (!gpu.ok()) return std::nullopt;
  sim::Gpu found = *gpu;
  found.count = static_cast<uint32_t>(facts.devices.size());
  return found;
}

/// Four digits are more than measurements of a busy machine repeat.
double rounded(double value) {
  if (value == 0) return 0;
  const double unit = std::pow(10, std::floor(std::log10(std::abs(value))) - 3);
  return std::round(value / unit) * unit;
}

/// Before some seconds of measuring, not after.
base::Status check_flags(const CalibrateFlags& flags) {
  if (flags.devices.empty() && !flags.links) {
    return base::Status(base::ErrorCode::kInvalidArgument, "--device is required",
                        "Name a directory on each drive that will be a device.");
  }
  const std::filesystem::path folder =
      std::filesystem::absolute(flags.links ? flags.save : flags.out).parent_path();
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    base::ErrorPlace place;
    place.path = folder.string();
    return base::Status(
        base::ErrorCode::kNotFound,
        fmt::format("--{}: its directory does not exist", flags.links ? "save" : "out"),
        "Make the directory, or choose another file.", std::move(place));
  }
  for (const std::string& path : flags.devices) SI_RETURN_IF_ERROR(check_directory(path));
  if (!flags.gpu.empty()) return sim::gpu_preset(flags.gpu).status();
  return {};
}

/// Rates of this machine's cores, as measured. Bytes are state and gradient in: 12 bytes a
/// parameter and 2, or the little there is of a compressed one.
struct CoreRates {
  uint32_t cores = 1;
  double products = 0;  // multiply-adds times two a second; 0: not measured
  double copy_bytes = 0;
  double loopback_bytes = 0;  // bytes that two ranks here send each other
  double update_bytes = 0;
  double expand_bytes = 0;
  SelectRate select;
  double step_ahead_params = 0;
  DecodeRates decode;
};

constexpr double kDensity = 0.08;

base::Result<CoreRates> measure_cores() {
  CoreRates rates;
  rates.cores = std::max(1u, cpu_facts().cores_allowed);
  SI_ASSIGN_OR_RETURN(rates.copy_bytes, measure_copy_rate(1));
  SI_ASSIGN_OR_RETURN(rates.loopback_bytes, measure_loopback_rate());
  ProcessorWork work{base::StateFormat::kF32, true};
  SI_ASSIGN_OR_RETURN(rates.update_bytes, measure_update_rate(work, rates.cores));
  rates.update_bytes *= 14;
  work.compress.density = kDensity;
  SI_ASSIGN_OR_RETURN(rates.expand_bytes, measure_update_rate(work, rates.cores));
  rates.expand_bytes *= 12;
  SI_ASSIGN_OR_RETURN(rates.select, measure_select_rate(work.compress));
  SI_ASSIGN_OR_RETURN(rates.step_ahead_params, measure_step_ahead_rate());
  SI_ASSIGN_OR_RETURN(rates.decode, measure_decode_rates(rates.cores));
  return rates;
}

/// The GPU of the flag, or that of this machine, or the cores in its place, of which the rate of
/// products is measured.
sim::Gpu computing_part(const CalibrateFlags& flags, CoreRates& rates) {
  if (!flags.gpu.empty()) return *sim::gpu_preset(flags.gpu);
  if (const auto listed = listed_gpu()) return *listed;
  sim::Gpu none;
  none.name = "none";
  none.memory_bytes_per_s = 10e9;
  none.link_bytes_per_s = 10e9;
  const auto products = train::measure_product_rate(train::Precision::kBf16);
  if (products.ok()) {
    rates.products = *products;
    none.peak_flops = rounded(*products);
    none.product_efficiency = 1;  // it is what products reach
  } else {
    // Assumed without torch: about what a core with AVX-512 makes in f32; with AMX or bf16
    // instructions it is several times as much. Edit it where it matters.
    none.peak_flops = 150e9 * rates.cores;
  }
  return none;
}

/// Bytes that this process has moved to and from drives, as the kernel counts them; 0: it does not.
double drive_bytes() {
  double bytes = 0;
  std::ifstream counted("/proc/self/io");
  for (std::string name; counted >> name;) {
    double value = 0;
    counted >> value;
    if (name == "read_bytes:" || name == "write_bytes:") bytes += value;
  }
  return bytes;
}

/// Bytes a second to and from a drive that would take all time of all cores; 0: it takes none.
base::Result<double> measure_drive_cores(const std::string& path, uint32_t cores) {
  BusyCores busy(cores);
  const double bytes = drive_bytes();
  busy.begin();
  SI_RETURN_IF_ERROR(storage::measure_io(path).status());
  return busy.rate(drive_bytes() - bytes);
}

/// in_flight_bytes: of transfers that fill the drive, one way.
base::Result<sim::DeviceGroup> measure_device(const std::string& path, const CoreRates& rates,
                                              size_t devices, uint64_t& in_flight_bytes) {
  storage::MeasureOptions options;
  options.sync = true;
  SI_ASSIGN_OR_RETURN(const storage::IoTuning tuning, storage::measure_io(path, options));
  if (tuning.read_bytes_per_second <= 0 || tuning.write_bytes_per_second <= 0) {
    return base::Status(base::ErrorCode::kUnsupported,
                        "--device is a block device, which is not measured, because that would "
                        "write to it",
                        "Name a directory on a drive of the same kind.");
  }
  in_flight_bytes = tuning.io_bytes * tuning.io_depth;
  // A run there need not measure again.
  if (const base::Status kept = storage::remember_tuning(path, tuning); !kept.ok()) {
    base::log(base::LogLevel::kWarning, kept.to_string());
  }
  sim::DeviceGroup device;
  device.name = path;
  // Both moved at once; each alone gets the whole budget.
  device.read_bytes_per_s = rounded(2 * tuning.read_bytes_per_second);
  device.write_bytes_per_s = rounded(2 * tuning.write_bytes_per_second);
  if (tuning.reads_alone_bytes_per_second < 2 * tuning.read_bytes_per_second) {
    device.reads_only_bytes_per_s = rounded(tuning.reads_alone_bytes_per_second);
  }
  SI_ASSIGN_OR_RETURN(const double cores_bytes, measure_drive_cores(path, rates.cores));
  device.cores_bytes_per_s = rounded(cores_bytes);
  device.sync_bytes_per_s = rounded(tuning.sync_bytes_per_second);
  if (const base::Status pages = measure_pages(path, device); !pages.ok()) {
    base::log(base::LogLevel::kWarning,
              "pages of tables' rows are taken to be as fast as other bytes: " + pages.to_string());
  }
  device.page_reads_per_s = rounded(device.page_reads_per_s);
  device.page_writes_per_s = rounded(device.page_writes_per_s);
  device.sync_s = rounded(device.sync_s);
  device.link_bytes_per_s = rounded(rates.copy_bytes / 2);
  device.update_bytes_per_s = rounded(rates.update_bytes / static_cast<double>(devices));
  device.decompress_bytes_per_s = rounded(rates.expand_bytes / static_cast<double>(devices));
  device.fold_bytes_per_s = rounded(rates.decode.fold_bytes_per_s);
  device.on_host_cores = true;
  device.memory_bytes = plan::kMemoryBudgetBytes;
  device.capacity_bytes = drive_facts(path).free_bytes;
  return device;
}

base::Result<sim::Machine> measure_machine(const CalibrateFlags& flags, CoreRates& rates) {
  sim::Machine machine;
  machine.name = flags.name;
  machine.note =
      "measured by smartinf calibrate; drives were read and written at the same time, so "
      "mixed_efficiency is part of their rates";
  SI_ASSIGN_OR_RETURN(rates, measure_cores());
  machine.gpu = computing_part(flags, rates);
  machine.host.memory_bytes = memory_facts().total_bytes;
  machine.host.copy_bytes_per_s = rounded(rates.copy_bytes);
  machine.host.select_params_per_s = rounded(rates.select.params_per_s * rates.select.threads);
  machine.host.step_ahead_params_per_s = rounded(rates.step_ahead_params);
  // State out again counts for the host update, too: 26 bytes for each 14 that come in.
  machine.host.update_bytes_per_s = rounded(rates.update_bytes * 26 / 14);
  // Local drives meet the host in its memory: every byte is written once and read once.
  machine.host.link_bytes_per_s = rounded(rates.copy_bytes / 2);
  machine.host.process_bytes = plan::kTorchBytes;  // text that train reads itself comes on top
  machine.host.decode_flops = rounded(rates.decode.flops);
  machine.host.decode_bytes_per_s = rounded(rates.decode.weight_bytes_per_s);
  machine.host.decode_value_s = rounded(rates.decode.value_s);
  machine.host.decode_product_s = rounded(rates.decode.product_s);
  machine.network.near_bytes_per_s = rounded(rates.loopback_bytes);
  plan::DeviceSlotsInput slots;
  slots.memory_bytes = ~uint64_t{0};
  slots.subgroups = plan::kSlotsMax;
  for (const std::string& path : flags.devices) {
    uint64_t in_flight_bytes = 0;
    SI_ASSIGN_OR_RETURN(sim::DeviceGroup device,
                        measure_device(path, rates, flags.devices.size(), in_flight_bytes));
    slots.in_flight_bytes = std::max(slots.in_flight_bytes, in_flight_bytes);
    machine.devices.push_back(std::move(device));
  }
  time_rows({}, machine);
  machine.host.row_s = rounded(machine.host.row_s);
  for (sim::DeviceGroup& device : machine.devices) {
    device.page_s = rounded(device.page_s);
    device.row_s = rounded(device.row_s);
    device.row_bytes_per_s = rounded(device.row_bytes_per_s);
  }
  // Subgroups, slots and transfers as the engine takes them on such drives.
  sim::Software& software = machine.software;
  software.subgroup_elements = plan::kSubgroupElementsMax;
  slots.slot_bytes = engine::state_bytes(kernels::UpdateRule::kAdamW, base::StateFormat::kF32,
                                         software.subgroup_elements);
  software.slots = static_cast<uint32_t>(plan::device_slots(slots));
  software.in_flight_bytes = slots.in_flight_bytes;
  software.gradient_bytes = 2;
  software.weight_bytes = 2;
  software.gradient_spilled = false;
  software.offload_waits = true;  // they are taken in by the thread that computes backward
  SI_RETURN_IF_ERROR(sim::check_machine(machine));
  return machine;
}

void print_json(const CalibrateFlags& flags, const sim::Machine& machine, const CoreRates& rates) {
  nlohmann::ordered_json all{{"file", flags.out},
                             {"copy_bytes_per_s", rates.copy_bytes},
                             {"near_bytes_per_s", rates.loopback_bytes},
                             {"update_bytes_per_s", rates.update_bytes},
                             {"decompress_bytes_per_s", rates.expand_bytes},
                             {"select_params_per_s", machine.host.select_params_per_s},
                             {"step_ahead_params_per_s", rates.step_ahead_params},
                             {"decode_flops", rates.decode.flops},
                             {"decode_bytes_per_s", rates.decode.weight_bytes_per_s},
                             {"decode_value_s", rates.decode.value_s},
                             {"decode_product_s", rates.decode.product_s},
                             {"fold_bytes_per_s", rates.decode.fold_bytes_per_s},
                             {"cores", rates.cores},
                             {"gpu", machine.gpu.name}};
  if (rates.products > 0) all["product_flops"] = rates.products;
  for (size_t d = 0; d < machine.devices.size(); ++d) {
    all[fmt::format("device{}_read_bytes_per_s", d)] = machine.devices[d].read_bytes_per_s;
    all[fmt::format("device{}_write_bytes_per_s", d)] = machine.devices[d].write_bytes_per_s;
    all[fmt::format("device{}_reads_only_bytes_per_s", d)] = machine.devices[d].reads_only();
    all[fmt::format("device{}_cores_bytes_per_s", d)] = machine.devices[d].cores_bytes_per_s;
    all[fmt::format("device{}_sync_bytes_per_s", d)] = machine.devices[d].sync_bytes_per_s;
    all[fmt::format("device{}_page_reads_per_s", d)] = machine.devices[d].page_reads_per_s;
    all[fmt::format("device{}_page_writes_per_s", d)] = machine.devices[d].page_writes_per_s;
  }
  fmt::print("{}\n", all.dump());
}

void print_rates(const sim::Machine& machine, const CoreRates& rates) {
  fmt::print("copy    {} (one thread)\nranks   {} from process to process\n",
             base::format_rate(rates.copy_bytes), base::format_rate(rates.loopback_bytes));
  fmt::print("update  {} ({} cores, state and gradient in)\n",
             base::format_rate(rates.update_bytes), rates.cores);
  fmt::print("select  {:.0f} M parameters/s ({} threads; compressed gradients, density {})\n",
             machine.host.select_params_per_s * 1e-6, rates.select.threads, kDensity);
  fmt::print("decode  {:.1f} GFLOP/s of 16 rows, weights at {} for one; keys and values at {}\n",
             rates.decode.flops * 1e-9, base::format_rate(rates.decode.weight_bytes_per_s),
             base::format_rate(rates.decode.fold_bytes_per_s));
  if (rates.products > 0) {
    fmt::print("compute {:.1f} GFLOP/s in bf16 matrix products (torch, {} cores)\n",
               rates.products * 1e-9, rates.cores);
  } else if (machine.gpu.name == "none") {
    fmt::print("compute {:.1f} GFLOP/s assumed: this build has no torch to time products with\n",
               machine.gpu.peak_flops * 1e-9);
  } else {
    fmt::print("compute data sheet of {} x {}, not measured\n", machine.gpu.count,
               machine.gpu.name);
  }
  for (const sim::DeviceGroup& device : machine.devices) {
    fmt::print("drive   {} read with {} written, at once: {}\n",
               base::format_rate(device.read_bytes_per_s / 2),
               base::format_rate(device.write_bytes_per_s / 2), device.name);
    fmt::print("        {} read alone\n", base::format_rate(device.reads_only()));
    fmt::print("rows    {:.0f} pages of 4 KiB a second read at random, {:.0f} written\n",
               device.page_reads_per_s, device.page_writes_per_s);
    if (device.cores_bytes_per_s > 0) {
      fmt::print("cores   {} to and from this drive would take all of their time\n",
                 base::format_rate(device.cores_bytes_per_s));
    }
    if (device.sync_bytes_per_s > 0) {
      fmt::print("sync    {} of what was written, at the end of a step\n",
                 base::format_rate(device.sync_bytes_per_s));
    }
  }
}

int run_calibrate(const CalibrateFlags& flags) {
  const base::Status good = check_flags(flags);
  if (!good.ok()) return report(good, kExitUsage);
  if (flags.links) {
    LinksJob job{flags.save, flags.name, nullptr};
    if (!flags.devices.empty()) {
      job.machine = [&]() -> base::Result<std::string> {
        CoreRates rates;
        SI_ASSIGN_OR_RETURN(const sim::Machine machine, measure_machine(flags, rates));
        return sim::machine_to_toml(machine);
      };
    }
    return run_links(job);
  }
  CoreRates rates;
  const auto machine = measure_machine(flags, rates);
  if (!machine.ok()) {
    const bool wrong_device = machine.status().code() == base::ErrorCode::kUnsupported;
    return report(machine.status(), wrong_device ? kExitUsage : kExitFailed);
  }
  std::ofstream file(flags.out, std::ios::binary);
  file << sim::machine_to_toml(*machine);
  file.flush();
  if (!file) return report(base::errno_status(errno, "cannot write", flags.out));
  if (flags.json) {
    print_json(flags, *machine, rates);
    return kExitDone;
  }
  print_rates(*machine, rates);
  fmt::print("{} written; smartinf plan MODEL --machine {}\n", flags.out, flags.out);
  return kExitDone;
}

}  // namespace

void add_calibrate(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("calibrate", "Measure this machine, for plan and simulate");
  auto flags = std::make_shared<CalibrateFlags>();
  command
      ->add_option("--device", flags->devices,
                   "Directory on each drive that will be a device; may be repeated")
      ->type_name("DIR");
  command->add_flag("--links", flags->links,
                    "Measure the links between the boxes of ranks that torchrun has started, and "
                    "each box if --device is given");
  command->add_option("--save", flags->save, "With --links: cluster's file to write [cluster.toml]")
      ->type_name("FILE");
  command->add_option("--out", flags->out, "Machine file to write [machine.toml]")
      ->type_name("FILE");
  command->add_option("--name", flags->name, "Name of the machine [this-machine]")
      ->type_name("NAME");
  command
      ->add_option(
          "--gpu", flags->gpu,
          "GPU of the machine, whose data sheet is used; it is not measured [as nvidia-smi says]")
      ->type_name("NAME");
  command->add_flag("--json", flags->json, "Print one flat JSON object");
  command->footer(
      "The command takes some seconds and 512 MiB of free space for each drive. Run it when "
      "nothing else runs.\n\n"
      "Examples:\n"
      "  smartinf calibrate --device /mnt/a --device /mnt/b --out machine.toml\n"
      "  smartinf plan llama3-3B --machine ./machine.toml\n"
      "  torchrun --nnodes 2 --node-rank N --master-addr HOST --master-port 29500 --no-python \\\n"
      "    --nproc-per-node 1 smartinf calibrate --links --device /mnt/a --save cluster.toml");
  command->callback([flags, &run] { run = [flags] { return run_calibrate(*flags); }; });
}

}  // namespace smartinf::apps
