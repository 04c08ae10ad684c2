// `smartinf calibrate`: measures this machine and writes a machine file for simulate and plan.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/nearest.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/options.h"
#include "smartinf/sim/machine.h"
#include "smartinf/storage/tuning.h"
#include "smartinf/train/product_rate.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/machine.h"
#include "apps/smartinf/update_rate.h"

namespace smartinf::apps {
namespace {

struct CalibrateFlags {
  std::vector<std::string> devices;
  std::string out = "machine.toml";
  std::string gpu;
  std::string name = "this-machine";
  bool json = false;
};

/// Resident in `smartinf train` whatever the model, half of it torch's code (torch 2.15 on x86-64);
/// fitted to the peaks in docs/results/plan_memory.md. Text that train reads itself comes on top.
constexpr uint64_t kProcessBytes = 418'000'000;

/// Of a name that may be mistyped: nothing is made for it.
base::Status check_directory(const std::string& path) {
  namespace fs = std::filesystem;
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
                      nearest.empty()
                          ? "Name an existing directory; calibrate does not make one."
                          : fmt::format("Did you mean {}? calibrate does not make a directory.",
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

int run_calibrate(const CalibrateFlags& flags) {
  // Before some seconds of measuring, not after.
  const std::filesystem::path folder = std::filesystem::absolute(flags.out).parent_path();
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    base::ErrorPlace place;
    place.path = folder.string();
    return report(base::Status(base::ErrorCode::kNotFound, "--out: its directory does not exist",
                               "Make the directory, or choose another --out.", std::move(place)),
                  kExitUsage);
  }
  for (const std::string& path : flags.devices) {
    const base::Status there = check_directory(path);
    if (!there.ok()) return report(there, kExitUsage);
  }
  sim::Machine machine;
  machine.name = flags.name;
  machine.note =
      "measured by smartinf calibrate; drives were read and written at the same time, so "
      "mixed_efficiency is part of their rates";
  const CpuFacts cpu = cpu_facts();
  const uint32_t cores = std::max(1u, cpu.cores_allowed);
  std::optional<sim::Gpu> listed;
  if (flags.gpu.empty()) listed = listed_gpu();
  double products = 0;  // measured
  if (listed) {
    machine.gpu = *listed;
  } else if (flags.gpu.empty()) {
    machine.gpu.name = "none";
    machine.gpu.memory_bytes = 0;
    const auto rate = train::measure_product_rate(train::Precision::kBf16);
    if (rate.ok()) {
      products = *rate;
      machine.gpu.peak_flops = rounded(products);
      machine.gpu.product_efficiency = 1;  // it is what products reach
    } else {
      // Assumed without torch: about what a core with AVX-512 makes in f32; with AMX or bf16
      // instructions it is several times as much. Edit it where it matters.
      machine.gpu.peak_flops = 150e9 * cores;
    }
    machine.gpu.memory_bytes_per_s = 10e9;
    machine.gpu.link_bytes_per_s = 10e9;
  } else {
    const auto gpu = sim::gpu_preset(flags.gpu);
    if (!gpu.ok()) return report(gpu.status(), kExitUsage);
    machine.gpu = *gpu;
  }
  const auto copies = measure_copy_rate(1);
  if (!copies.ok()) return report(copies.status());
  const auto update_params = measure_update_rate({base::StateFormat::kF32, true}, cores);
  if (!update_params.ok()) return report(update_params.status());
  compress::CompressOptions compress;
  compress.density = 0.08;
  const auto expand_params = measure_update_rate({base::StateFormat::kF32, true, compress}, cores);
  if (!expand_params.ok()) return report(expand_params.status());
  const auto select = measure_select_rate(compress);
  if (!select.ok()) return report(select.status());
  const auto step_ahead = measure_step_ahead_rate();
  if (!step_ahead.ok()) return report(step_ahead.status());
  // State and gradient in: 12 bytes per parameter and 2, or the little there is when compressed.
  const double updates = *update_params * 14;
  const double expansions = *expand_params * 12;
  machine.host.memory_bytes = memory_facts().total_bytes;
  machine.host.copy_bytes_per_s = rounded(*copies);
  machine.host.select_params_per_s = rounded(select->params_per_s * select->threads);
  machine.host.step_ahead_params_per_s = rounded(*step_ahead);
  // State out again counts for the host update, too: 26 bytes for each 14 that come in.
  machine.host.update_bytes_per_s = rounded(updates * 26 / 14);
  // Local drives meet the host in its memory: every byte is written once and read once.
  machine.host.link_bytes_per_s = rounded(*copies / 2);
  machine.host.process_bytes = kProcessBytes;
  uint64_t in_flight_bytes = 0;
  for (const std::string& path : flags.devices) {
    const auto tuning = storage::measure_io(path);
    if (!tuning.ok()) return report(tuning.status());
    if (tuning->read_bytes_per_second <= 0 || tuning->write_bytes_per_second <= 0) {
      return report(
          base::Status(
              base::ErrorCode::kUnsupported,
              "--device is a block device, which is not measured, because that would write to it",
              "Name a directory on a drive of the same kind."),
          kExitUsage);
    }
    sim::DeviceGroup device;
    device.name = path;
    in_flight_bytes = std::max(in_flight_bytes, tuning->io_bytes * tuning->io_depth);
    // Both moved at once; each alone gets the whole budget.
    device.read_bytes_per_s = rounded(2 * tuning->read_bytes_per_second);
    device.write_bytes_per_s = rounded(2 * tuning->write_bytes_per_second);
    device.link_bytes_per_s = rounded(*copies / 2);
    device.update_bytes_per_s = rounded(updates / static_cast<double>(flags.devices.size()));
    device.decompress_bytes_per_s = rounded(expansions / static_cast<double>(flags.devices.size()));
    device.memory_bytes = uint64_t{512} << 20;
    device.capacity_bytes = drive_facts(path).free_bytes;
    machine.devices.push_back(std::move(device));
  }
  sim::Software& software = machine.software;
  // What the engine takes on such drives (engine/memory_plan.cc, csd/local_device.cc): subgroups of
  // 2^20, and slots for the transfers in flight each way and two at the processor.
  software.subgroup_elements = uint64_t{1} << 20;
  software.slots = static_cast<uint32_t>(std::max<uint64_t>(
      6, 2 * base::divide_up(in_flight_bytes, 12 * software.subgroup_elements) + 2));
  software.gradient_bytes = 2;
  software.weight_bytes = 2;
  software.gradient_spilled = false;
  software.offload_waits = false;
  const base::Status valid = sim::check_machine(machine);
  if (!valid.ok()) return report(valid);
  const std::string text = sim::machine_to_toml(machine);
  std::ofstream file(flags.out, std::ios::binary);
  file << text;
  file.flush();
  if (!file) return report(base::errno_status(errno, "cannot write", flags.out));
  if (flags.json) {
    nlohmann::ordered_json all{{"file", flags.out},
                               {"copy_bytes_per_s", *copies},
                               {"update_bytes_per_s", updates},
                               {"decompress_bytes_per_s", expansions},
                               {"select_params_per_s", machine.host.select_params_per_s},
                               {"step_ahead_params_per_s", *step_ahead},
                               {"cores", cores},
                               {"gpu", machine.gpu.name}};
    if (products > 0) all["product_flops"] = products;
    for (size_t d = 0; d < machine.devices.size(); ++d) {
      all[fmt::format("device{}_read_bytes_per_s", d)] = machine.devices[d].read_bytes_per_s;
      all[fmt::format("device{}_write_bytes_per_s", d)] = machine.devices[d].write_bytes_per_s;
    }
    fmt::print("{}\n", all.dump());
    return kExitDone;
  }
  fmt::print("copy    {} (one thread)\nupdate  {} ({} cores, state and gradient in)\n",
             base::format_rate(*copies), base::format_rate(updates), cores);
  fmt::print("select  {:.0f} M parameters/s ({} threads; compressed gradients, density {})\n",
             machine.host.select_params_per_s * 1e-6, select->threads, compress.density);
  if (products > 0) {
    fmt::print("compute {:.1f} GFLOP/s in bf16 matrix products (torch, {} cores)\n",
               products * 1e-9, cores);
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
  }
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
      ->required()
      ->type_name("DIR");
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
      "It takes some seconds and 512 MiB of free space for each drive. Run it when nothing else "
      "runs.\n\n"
      "Examples:\n"
      "  smartinf calibrate --device /mnt/a --device /mnt/b --out machine.toml\n"
      "  smartinf plan llama3-3B --machine ./machine.toml");
  command->callback([flags, &run] { run = [flags] { return run_calibrate(*flags); }; });
}

}  // namespace smartinf::apps
