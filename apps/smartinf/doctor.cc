// `smartinf doctor`: what this machine can do, and what to do about what it cannot.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"
#include "smartinf/base/unified_memory.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/opencl_processor.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/kernels/update.h"
#include "smartinf/storage/ring.h"
#include "smartinf/train/product_rate.h"

#include "apps/smartinf/child.h"
#include "apps/smartinf/commands.h"
#include "apps/smartinf/machine.h"
#include "apps/smartinf/remote_flags.h"
#include "apps/smartinf/wear.h"

namespace smartinf::apps {
namespace {

enum class Level : uint8_t { kOk, kNote, kWarning };

struct Finding {
  std::string topic;
  Level level = Level::kOk;
  std::string value;
  std::string advice;
};

// The doctor's findings, in the order of looking.
class Report {
 public:
  void ok(std::string topic, std::string value) {
    add(std::move(topic), Level::kOk, std::move(value), {});
  }
  void note(std::string topic, std::string value, std::string advice) {
    add(std::move(topic), Level::kNote, std::move(value), std::move(advice));
  }
  void warn(std::string topic, std::string value, std::string advice) {
    add(std::move(topic), Level::kWarning, std::move(value), std::move(advice));
  }

  void print() const {
    size_t warnings = 0;
    for (const Finding& finding : findings_) {
      std::printf("%-5s %-18s %s\n", level_name(finding.level), finding.topic.c_str(),
                  finding.value.c_str());
      if (!finding.advice.empty()) std::printf("%24s -> %s\n", "", finding.advice.c_str());
      if (finding.level == Level::kWarning) ++warnings;
    }
    if (warnings == 0) {
      std::printf("\nNothing stands in the way.\n");
    } else {
      std::printf("\n%zu finding%s to look at.\n", warnings, warnings == 1 ? "" : "s");
    }
  }

  nlohmann::json to_json() const {
    nlohmann::json list = nlohmann::json::array();
    for (const Finding& finding : findings_) {
      list.push_back({{"topic", finding.topic},
                      {"level", level_name(finding.level)},
                      {"value", finding.value},
                      {"advice", finding.advice}});
    }
    return list;
  }

 private:
  static const char* level_name(Level level) {
    switch (level) {
      case Level::kOk:
        return "ok";
      case Level::kNote:
        return "note";
      case Level::kWarning:
        return "warn";
    }
    return "?";
  }
  void add(std::string topic, Level level, std::string value, std::string advice) {
    findings_.push_back({std::move(topic), level, std::move(value), std::move(advice)});
  }
  std::vector<Finding> findings_;
};

void look_at_rings(Report& report) {
  const base::Status uring = storage::probe_uring();
  if (uring.ok()) {
    report.ok("I/O engine", "io_uring");
  } else {
    report.note("I/O engine", fmt::format("pool of threads; not io_uring: {}", uring.what()),
                uring.advice().empty()
                    ? "Results are the same; small transfers cost more processor time."
                    : uring.advice());
  }
}

void look_at_memory(const MemoryFacts& memory, Report& report) {
  // The engine's default budget; buffers that the kernel maps once are locked memory.
  constexpr uint64_t kBudgetBytes = uint64_t{512} << 20;
  std::string value = fmt::format("{} in all, {} available", base::format_bytes(memory.total_bytes),
                                  base::format_bytes(memory.available_bytes));
  uint64_t usable = memory.available_bytes;
  if (memory.cgroup_limit_bytes && *memory.cgroup_limit_bytes < memory.total_bytes) {
    value += fmt::format(", limited to {} by its cgroup",
                         base::format_bytes(*memory.cgroup_limit_bytes));
    usable = std::min(usable, *memory.cgroup_limit_bytes);
  }
  if (usable < 2 * kBudgetBytes) {
    report.warn("memory", value,
                "Set a smaller engine.memory_budget, e.g. --engine.memory_budget 128MiB.");
  } else {
    report.ok("memory", value);
  }
  if (!memory.locked_limit_bytes) {
    report.ok("locked memory", "unlimited");
  } else if (*memory.locked_limit_bytes < kBudgetBytes) {
    report.note(
        "locked memory", fmt::format("limit {}", base::format_bytes(*memory.locked_limit_bytes)),
        fmt::format("Below the memory budget ({}): buffers may not be registered with io_uring, "
                    "which costs a little speed. Raise it with `ulimit -l` or a file in "
                    "/etc/security/limits.d.",
                    base::format_bytes(kBudgetBytes)));
  } else {
    report.ok("locked memory",
              fmt::format("limit {}", base::format_bytes(*memory.locked_limit_bytes)));
  }
}

void look_at_cores(const CpuFacts& cpu, Report& report) {
  std::string value = fmt::format("{} of {}", cpu.cores_allowed, cpu.cores_online);
  if (cpu.cgroup_cores) value += fmt::format(", {:.3g} by the cgroup's quota", *cpu.cgroup_cores);
  if (!cpu.model.empty()) value += ", " + cpu.model;
  report.ok("cores", value);
  if (cpu.numa_nodes > 1) {
    report.note("NUMA", fmt::format("{} nodes", cpu.numa_nodes),
                "A device's threads are fastest on the node that its drive is attached to; see the "
                "drive's line below.");
  } else {
    report.ok("NUMA", "1 node");
  }
}

void look_at_kernels(Report& report) {
  // Highway's names, by which SMARTINF_FORCE_ISA pins one, and the one that people know.
  const auto name = [](const kernels::KernelTable& table) {
    return std::string(table.isa()) + (table.isa().starts_with("AVX3") ? " (AVX-512)" : "");
  };
  std::string value = name(kernels::kernels());
  std::vector<std::string> names;
  for (const kernels::KernelTable* table : kernels::supported_tables())
    names.push_back(name(*table));
  value += fmt::format(" in use, of {}", fmt::join(names, ", "));
  const base::Status forced = kernels::forced_isa_status();
  const char* pin = std::getenv("SMARTINF_FORCE_ISA");
  if (!forced.ok()) {
    report.warn("instruction set", value, forced.to_string());
  } else if (pin != nullptr && *pin != '\0') {
    report.note("instruction set", fmt::format("{}; selected by SMARTINF_FORCE_ISA={}", value, pin),
                "Unset it for the fastest one; results are the same.");
  } else {
    report.ok("instruction set", value);
  }
}

// The value of `name = '...'` in torch/version.py.
std::string python_constant(const std::string& text, std::string_view name) {
  size_t at = text.find(fmt::format("\n{}", name));
  if (at == std::string::npos) return {};
  at = text.find('=', at);
  const size_t open = text.find('\'', at);
  const size_t line_end = text.find('\n', at);
  if (open == std::string::npos || open > line_end) return {};
  return text.substr(open + 1, text.find('\'', open + 1) - open - 1);
}

void look_at_torch(Report& report) {
  const GpuFacts gpu = gpu_facts();
  const std::string folder = SMARTINF_TORCH_DIR;
  if (folder.empty()) {
    report.note("torch", "not in this build; everything but training works",
                "Run scripts/setup.sh to install torch and build with it.");
  } else {
    std::ifstream file(folder + "/version.py");
    const std::string text("\n" + std::string(std::istreambuf_iterator<char>(file), {}));
    const std::string version = python_constant(text, "__version__");
    const std::string cuda = python_constant(text, "cuda");
    if (version.empty()) {
      report.warn("torch", fmt::format("built with the one in {}, which no longer exists", folder),
                  "Run scripts/setup.sh again.");
    } else {
      report.ok("torch",
                fmt::format("{}{} in {}", version, cuda.empty() ? "" : ", CUDA " + cuda, folder));
    }
  }
  if (!gpu.driver) {
    report.ok("GPU", "none with an NVIDIA driver; models are computed on the CPU");
  } else if (gpu.devices.empty()) {
    report.warn(
        "GPU", "an NVIDIA driver is loaded, but nvidia-smi shows no GPU",
        "Check that the GPU is available in this container, and that nvidia-smi is installed.");
  } else {
    for (const std::string& device : gpu.devices) report.ok("GPU", device);
    report.ok("GPU memory", base::memory_is_unified()
                                ? "the host's own: smartinf train copies no weights to the GPU"
                                : "its own");
  }
}

/// Shows the rate of products, measured by this very program's sibling with torch in a process of
/// its own: where torch is broken the doctor still works.
void look_at_products(Report& report) {
  std::error_code failed;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", failed);
  const auto with_torch = self.parent_path() / "smartinf-torch";
  if (failed || !std::filesystem::exists(with_torch, failed)) return;
  const auto said =
      child_output({with_torch.string(), "doctor", "--products"}, std::chrono::seconds(60));
  const nlohmann::json json = base::parse_json(said.value_or(""));
  if (!json.is_object() || !json.contains("text") || !json["text"].is_string()) {
    return report.warn("products", with_torch.string() + " cannot measure products of matrices",
                       "Run scripts/setup.sh again.");
  }
  const auto text = json["text"].get<std::string>();
  if (json.contains("fast_bf16") && json["fast_bf16"] == true) return report.ok("products", text);
  report.note("products", text,
              "smartinf train chooses f32 (train.precision = \"auto\"); in Python load models with "
              "dtype=\"float32\".");
}

/// For look_at_products().
int print_products() {
  const base::Result<train::ProductRates> rates = train::compare_product_rates(/*threads=*/0);
  if (!rates.ok()) return report(rates.status());
  const nlohmann::json json{{"fast_bf16", rates->fast_bf16},
                            {"text", train::describe_product_rates(*rates)}};
  std::printf("%s\n", json.dump().c_str());
  return kExitDone;
}

// Programs that are not kept yet take some seconds each to build, so devices are tested when asked
// for.
void look_at_opencl(bool test, Report& report) {
  const auto devices = csd::opencl_devices();
  if (!devices.ok())
    return report.note("OpenCL", devices.status().what(), devices.status().advice());
  if (devices->empty()) {
    return report.ok("OpenCL", "no platform with a device; states are updated by the cores");
  }
  for (size_t i = 0; i < devices->size(); ++i) {
    const csd::OpenClDevice& device = (*devices)[i];
    const std::string value = fmt::format("{}: {} ({})", i, device.name, device.driver);
    csd::OpenClOptions options;
    options.device = std::to_string(i);
    const base::Status tested = test ? csd::opencl_self_test(options) : base::Status();
    if (!tested.ok()) {
      report.warn("OpenCL", value + ": " + tested.what(), tested.advice());
    } else if (test) {
      report.ok("OpenCL", value + ": computes the same bits as the cores");
    } else {
      report.ok("OpenCL", value + "; doctor --opencl tests it");
    }
  }
}

bool is_virtual(const DriveFacts& drive) {
  return drive.kernel_name.starts_with("vd") || drive.kernel_name.starts_with("xvd");
}

std::string drive_text(const DriveFacts& drive) {
  std::string text = drive.model;
  if (!drive.kernel_name.empty()) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", drive.kernel_name);
  }
  if (is_virtual(drive)) {
    text += ", a virtual drive";  // whose "rotational" says nothing of what is behind it
  } else if (drive.rotational) {
    text += *drive.rotational ? ", spinning disk" : ", solid state";
  }
  if (drive.numa_node) text += fmt::format(", NUMA node {}", *drive.numa_node);
  return text;
}

// The state of one parameter in two slots: what the default format needs of a device.
constexpr uint64_t kStateBytes = 24;

nlohmann::json facts_json(const std::string& path, const DriveFacts& drive) {
  nlohmann::json json = {{"path", path},
                         {"file_system", drive.file_system},
                         {"mount_point", drive.mount_point},
                         {"source", drive.source},
                         {"size_bytes", drive.size_bytes},
                         {"free_bytes", drive.free_bytes},
                         {"writable", drive.writable},
                         {"drive", drive.kernel_name},
                         {"model", drive.model}};
  if (drive.direct_io) json["direct_io"] = *drive.direct_io;
  if (drive.rotational) json["rotational"] = *drive.rotational;
  if (drive.temperature_celsius) json["temperature_celsius"] = *drive.temperature_celsius;
  if (drive.wear_share) json["wear_share"] = *drive.wear_share;
  if (drive.written_bytes) json["drive_bytes_written"] = *drive.written_bytes;
  return json;
}

void look_at_space(const DriveFacts& drive, Report& report) {
  if (drive.is_block_device) {
    report.ok("  space",
              fmt::format("{}, all of it used: about {} parameters (f32)",
                          base::format_bytes(drive.size_bytes),
                          base::format_count(static_cast<double>(drive.size_bytes / kStateBytes))));
    return;
  }
  const std::string space =
      fmt::format("{} free of {} on {}: room for about {} parameters (f32)",
                  base::format_bytes(drive.free_bytes), base::format_bytes(drive.size_bytes),
                  drive.file_system.empty() ? "an unknown file system" : drive.file_system,
                  base::format_count(static_cast<double>(drive.free_bytes / kStateBytes)));
  if (drive.free_bytes < (uint64_t{1} << 30)) {
    report.warn("  space", space, "Make room, or choose another drive.");
  } else {
    report.ok("  space", space);
  }
}

void look_at_file_system(const DriveFacts& drive, Report& report) {
  if (drive.file_system == "tmpfs" || drive.file_system == "ramfs") {
    report.warn("  file system", drive.file_system + ": this is memory, not a drive",
                "The state would take memory, and be lost at the next boot.");
  } else if (drive.file_system == "overlay") {
    report.note("  file system", "overlay: a container's own layer",
                "It is deleted with the container; mount a volume to keep runs.");
  } else if (drive.file_system.starts_with("nfs") || drive.file_system == "cifs" ||
             drive.file_system == "9p" || drive.file_system.starts_with("fuse")) {
    report.note("  file system", drive.file_system + ": not a local drive",
                "The server decides what survives a power loss; a local drive is faster.");
  }
  if (drive.direct_io && !*drive.direct_io) {
    report.note("  direct I/O", fmt::format("refused ({})", drive.direct_io_problem),
                "Transfers go through the page cache, which is slower and displaces other files.");
  } else if (drive.direct_io) {
    report.ok("  direct I/O", "works");
  }
}

void look_at_drive(const DriveFacts& drive, Report& report) {
  const std::string text = drive_text(drive);
  if (text.empty()) return;
  if (drive.rotational.value_or(false) && !is_virtual(drive)) {
    report.note("  drive", text, "Every step reads and writes all state: expect 0.1-0.2 GB/s.");
  } else {
    report.ok("  drive", text);
  }
  if (drive.wear_share || drive.written_bytes) {
    const std::string wear = drive_wear_text(drive);
    if (drive.wear_share.value_or(0) > 0.8) {
      report.warn("  wear", wear,
                  "Every step rewrites the state: use another drive, or "
                  "optimizer.format = \"bf16\" or \"q8\", with optimizer.master = \"m24\".");
    } else {
      report.ok("  wear", wear);
    }
  } else {
    report.note("  wear", "not known", drive.wear_source);
  }
}

void look_at_state(csd::DeviceSource& source, const std::string& path, const DriveFacts& drive,
                   Report& report, nlohmann::json& json) {
  const auto held = source.summarize();
  if (held.ok()) {
    const storage::StoreState& state = held->state;
    report.ok("  holds", state.initialized
                             ? fmt::format("run {}, step {}; see smartinf inspect {}",
                                           state.run.to_string(), state.committed_step, path)
                             : "a store whose creation was interrupted; the next run starts over");
    json["run"] = state.run.to_string();
    json["committed_step"] = state.committed_step;
    report.ok("  written", wear_text(held->bytes_written_ever, 0, drive));
    json["bytes_written_ever"] = held->bytes_written_ever;
  } else if (held.status().code() == base::ErrorCode::kNotFound) {
    report.ok("  holds", "no state yet");
  } else {
    report.warn("  holds", held.status().what(), held.status().advice());
  }
}

void look_at_remote(const std::string& url, const serve::RemoteOptions& remote, Report& report,
                    nlohmann::json& json) {
  json = {{"path", url}};
  const auto source =
      std::move(engine::sources_at({url}, storage::RingKind::kAuto, remote).front());
  const auto capacity = source->capacity_bytes();
  if (!capacity.ok()) {
    report.warn("device", capacity.status().what(), capacity.status().advice());
    return;
  }
  report.ok("device", url);
  report.ok("  space",
            fmt::format("{} may be used: room for about {} parameters (f32)",
                        base::format_bytes(*capacity),
                        base::format_count(static_cast<double>(*capacity / kStateBytes))));
  json["free_bytes"] = *capacity;
  look_at_state(*source, url, DriveFacts{}, report, json);
}

void look_at_device(const std::string& path, const serve::RemoteOptions& remote, Report& report,
                    nlohmann::json& json) {
  if (serve::is_remote(path)) return look_at_remote(path, remote, report, json);
  const DriveFacts drive = drive_facts(path);
  const std::string topic = "device";
  json = facts_json(path, drive);
  if (!drive.is_directory && !drive.is_block_device) {
    report.warn(topic, fmt::format("{}: neither a directory nor a block device", path),
                "Name a directory on the drive to use, or the drive's block device.");
    return;
  }
  report.ok(topic, drive.existing_path == std::filesystem::absolute(path).string()
                       ? path
                       : fmt::format("{} (will be made in {})", path, drive.existing_path));
  if (drive.read_only_mount || !drive.writable) {
    report.warn(
        "  access", drive.read_only_mount ? "mounted read-only" : "not writable for this user",
        fmt::format("Choose another place, or let this user write to {}.", drive.existing_path));
  }
  look_at_space(drive, report);
  if (!drive.is_block_device) look_at_file_system(drive, report);
  look_at_drive(drive, report);
  look_at_state(*engine::sources_at({path}).front(), path, drive, report, json);
}

struct DoctorFlags {
  std::vector<std::string> devices;
  bool opencl = false;
  bool products = false;  // only these: look_at_products()
  bool json = false;
  serve::RemoteOptions remote;
};

int run_doctor(const DoctorFlags& flags) {
  if (flags.products) return print_products();
  Report report;
  report.ok("smartinf", fmt::format("{} on {}", SMARTINF_VERSION, system_name()));
  if (const std::string sanitizers = SMARTINF_SANITIZERS; !sanitizers.empty()) {
    report.note("build", "with sanitizers: " + sanitizers,
                "This build is much slower; do not measure with it.");
  }
  look_at_rings(report);
  look_at_memory(memory_facts(), report);
  look_at_cores(cpu_facts(), report);
  look_at_kernels(report);
  look_at_torch(report);
  look_at_products(report);
  look_at_opencl(flags.opencl, report);
  nlohmann::json devices = nlohmann::json::array();
  std::vector<std::string> paths = flags.devices;
  if (paths.empty()) paths.push_back(".");
  for (const std::string& path : paths) {
    look_at_device(path, flags.remote, report, devices.emplace_back());
  }
  if (flags.json) {
    const nlohmann::json all{{"version", SMARTINF_VERSION},
                             {"instruction_set", kernels::kernels().isa()},
                             {"findings", report.to_json()},
                             {"devices", devices}};
    std::printf("%s\n", all.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    report.print();
  }
  return kExitDone;
}

}  // namespace

void add_doctor(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("doctor", "Show what this machine can do, with advice");
  auto flags = std::make_shared<DoctorFlags>();
  command
      ->add_option("-d,--device", flags->devices,
                   "Directory or block device to examine; may be repeated [the working directory]")
      ->type_name("DIR");
  command->add_flag(
      "--opencl", flags->opencl,
      "Compare the OpenCL devices' bits with the cores'; the first time builds programs");
  command->add_flag("--products", flags->products)->group("");
  command->add_flag("--json", flags->json, "Print one JSON object");
  add_remote_flags(*command, flags->remote);
  command->footer(
      "Examples:\n"
      "  smartinf doctor\n"
      "  smartinf doctor --device /mnt/nvme0 --device /mnt/nvme1\n"
      "  smartinf doctor --json | python3 -m json.tool");
  command->callback([flags, &run] { run = [flags] { return run_doctor(*flags); }; });
}

}  // namespace smartinf::apps
