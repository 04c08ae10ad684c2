// `smartinf calibrate`: measures this machine and writes a machine file for simulate and plan.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/update.h"
#include "smartinf/sim/machine.h"
#include "smartinf/storage/tuning.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/machine.h"

namespace smartinf::apps {
namespace {

struct CalibrateFlags {
  std::vector<std::string> devices;
  std::string out = "machine.toml";
  std::string gpu;
  std::string name = "this-machine";
  bool json = false;
};

/// The best of five passes: what the machine can do, not what else it was doing.
template <typename Work>
double best_seconds(Work work) {
  double best_s = 1e30;
  for (int i = 0; i < 5; ++i) {
    const uint64_t start_ns = base::now_ns();
    work();
    best_s = std::min(best_s, base::seconds_since(start_ns));
  }
  return best_s;
}

/// One thread's copy between buffers too large for its caches, bytes per second.
base::Result<double> copy_rate() {
  constexpr uint64_t kBytes = uint64_t{128} << 20;
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer from, base::AlignedBuffer::allocate(kBytes));
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer to, base::AlignedBuffer::allocate(kBytes));
  return static_cast<double>(kBytes) /
         best_seconds([&] { std::memcpy(to.data(), from.data(), kBytes); });
}

/// All cores' update at once, state and gradient in, bytes per second. f32 state, bf16 gradient.
base::Result<double> update_rate(uint32_t threads) {
  constexpr uint64_t kBlocks = 64;  // 64 x 1 MiB per thread: beyond the caches
  constexpr uint64_t kBlock = base::kBlockElements;
  constexpr uint64_t kBlockBytes = kBlock * (12 + 2 + 2);
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer memory,
                      base::AlignedBuffer::allocate(threads * kBlocks * kBlockBytes));
  const kernels::StepScalars scalars =
      kernels::make_step_scalars(kernels::RuleOptions{}, kernels::GroupOptions{}, 1, 1.0, 0);
  const auto pass = [&](uint32_t thread) {
    for (uint64_t b = 0; b < kBlocks; ++b) {
      std::byte* at = memory.data() + (thread * kBlocks + b) * kBlockBytes;
      kernels::UpdateBlock block;
      block.planes = {at, at + 4 * kBlock, at + 8 * kBlock};
      block.count = kBlock;
      block.gradient = at + 12 * kBlock;
      block.weights_out = at + 14 * kBlock;
      const kernels::GroupRun run{kBlock, &scalars};
      kernels::kernels().update_block(base::StateFormat::kF32, block, {&run, 1});
    }
  };
  const double seconds = best_seconds([&] {
    std::vector<std::jthread> workers;
    for (uint32_t t = 0; t < threads; ++t) workers.emplace_back(pass, t);
  });
  return static_cast<double>(threads * kBlocks * kBlock * 14) / seconds;
}

int run_calibrate(const CalibrateFlags& flags) {
  sim::Machine machine;
  machine.name = flags.name;
  machine.note =
      "measured by smartinf calibrate; drives with reads and writes at once, so that "
      "mixed_efficiency is part of their rates";
  const CpuFacts cpu = cpu_facts();
  const uint32_t cores = std::max(1u, cpu.cores_allowed);
  if (flags.gpu.empty()) {
    machine.gpu.name = "none";
    machine.gpu.memory_bytes = 0;
    // Not measured: this command has no matrix products. A core with AVX-512 makes about this much
    // in f32; with AMX or bf16 instructions several times as much. Edit it where it matters.
    machine.gpu.peak_flops = 150e9 * cores;
    machine.gpu.memory_bytes_per_s = 10e9;
    machine.gpu.link_bytes_per_s = 10e9;
  } else {
    const auto gpu = sim::gpu_preset(flags.gpu);
    if (!gpu.ok()) return report(gpu.status(), kExitUsage);
    machine.gpu = *gpu;
  }
  const auto copies = copy_rate();
  if (!copies.ok()) return report(copies.status());
  const auto updates = update_rate(cores);
  if (!updates.ok()) return report(updates.status());
  machine.host.memory_bytes = memory_facts().total_bytes;
  machine.host.copy_bytes_per_s = *copies;
  // State out again counts for the host update, too: 26 bytes for each 14 that come in.
  machine.host.update_bytes_per_s = *updates * 26 / 14;
  // Local drives meet the host in its memory: every byte is written once and read once.
  machine.host.link_bytes_per_s = *copies / 2;
  for (const std::string& path : flags.devices) {
    const auto tuning = storage::measure_io(path);
    if (!tuning.ok()) return report(tuning.status());
    if (tuning->read_bytes_per_second <= 0 || tuning->write_bytes_per_second <= 0) {
      return report(base::Status(base::ErrorCode::kUnsupported,
                                 "a block device is not measured, because that would write to it",
                                 "Give a directory on a drive of the same kind."),
                    kExitUsage);
    }
    sim::DeviceGroup device;
    device.name = path;
    // Both moved at once; each alone gets the whole budget.
    device.read_bytes_per_s = 2 * tuning->read_bytes_per_second;
    device.write_bytes_per_s = 2 * tuning->write_bytes_per_second;
    device.link_bytes_per_s = *copies / 2;
    device.update_bytes_per_s = *updates / static_cast<double>(flags.devices.size());
    device.memory_bytes = uint64_t{512} << 20;
    device.capacity_bytes = drive_facts(path).free_bytes;
    machine.devices.push_back(std::move(device));
  }
  sim::Software& software = machine.software;
  software.subgroup_elements = uint64_t{1} << 22;
  software.slots = 4;
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
                               {"update_bytes_per_s", *updates},
                               {"cores", cores}};
    for (size_t d = 0; d < machine.devices.size(); ++d) {
      all[fmt::format("device{}_read_bytes_per_s", d)] = machine.devices[d].read_bytes_per_s;
      all[fmt::format("device{}_write_bytes_per_s", d)] = machine.devices[d].write_bytes_per_s;
    }
    fmt::print("{}\n", all.dump());
    return kExitDone;
  }
  fmt::print("copy    {} (one thread)\nupdate  {} ({} cores, state and gradient in)\n",
             base::format_rate(*copies), base::format_rate(*updates), cores);
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
  CLI::App* command = app.add_subcommand("calibrate", "Measure this machine for simulate and plan");
  auto flags = std::make_shared<CalibrateFlags>();
  command->add_option("--device", flags->devices, "A directory on each drive that will be a device")
      ->required()
      ->type_name("DIR");
  command->add_option("--out", flags->out, "The machine file to write [machine.toml]")
      ->type_name("FILE");
  command->add_option("--name", flags->name, "Its name [this-machine]")->type_name("NAME");
  command->add_option("--gpu", flags->gpu, "Take this GPU's data sheet; it is not measured")
      ->type_name("NAME");
  command->add_flag("--json", flags->json, "Print one flat JSON object");
  command->footer(
      "Takes some seconds for each drive and needs 512 MiB free on it. Run it when nothing else "
      "runs.\n\n"
      "Examples:\n"
      "  smartinf calibrate --device /mnt/a --device /mnt/b --out machine.toml\n"
      "  smartinf plan llama3-3B --machine ./machine.toml");
  command->callback([flags, &run] { run = [flags] { return run_calibrate(*flags); }; });
}

}  // namespace smartinf::apps
