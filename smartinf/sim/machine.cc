#include "smartinf/sim/machine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <optional>
#include <sstream>
#include <type_traits>

#include <fmt/format.h>

#include "smartinf/base/file.h"
#include "smartinf/base/nearest.h"
#include "smartinf/base/units.h"
#include "smartinf/sim/machine_presets.h"

#define TOML_HEADER_ONLY 1
#define TOML_EXCEPTIONS 0
#include "smartinf/base/toml.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

// What a value must satisfy; the message of a violation says it in words.
enum class Rule : uint8_t { kAny, kPositive, kNotNegative, kShare };

// Every key of the file, once: reading, writing and checking follow from these.
template <typename Visitor>
void visit(Visitor& v, Gpu& gpu) {
  v("name", gpu.name, Rule::kAny);
  v("count", gpu.count, Rule::kPositive);
  v("memory_bytes", gpu.memory_bytes, Rule::kNotNegative);
  v("peak_flops", gpu.peak_flops, Rule::kPositive);
  v("product_efficiency", gpu.product_efficiency, Rule::kShare);
  v("memory_bytes_per_s", gpu.memory_bytes_per_s, Rule::kPositive);
  v("activation_passes", gpu.activation_passes, Rule::kNotNegative);
  v("select_passes", gpu.select_passes, Rule::kNotNegative);
  v("link_bytes_per_s", gpu.link_bytes_per_s, Rule::kPositive);
  v("links_shared", gpu.links_shared, Rule::kAny);
  v("link_is_host_link", gpu.link_is_host_link, Rule::kAny);
}

template <typename Visitor>
void visit(Visitor& v, Host& host) {
  v("memory_bytes", host.memory_bytes, Rule::kNotNegative);
  v("link_bytes_per_s", host.link_bytes_per_s, Rule::kPositive);
  v("update_bytes_per_s", host.update_bytes_per_s, Rule::kPositive);
  v("weights_bytes_per_s", host.weights_bytes_per_s, Rule::kNotNegative);
  v("copy_bytes_per_s", host.copy_bytes_per_s, Rule::kPositive);
  v("select_params_per_s", host.select_params_per_s, Rule::kNotNegative);
  v("step_ahead_params_per_s", host.step_ahead_params_per_s, Rule::kNotNegative);
  v("process_bytes", host.process_bytes, Rule::kNotNegative);
}

template <typename Visitor>
void visit(Visitor& v, DeviceGroup& device) {
  v("name", device.name, Rule::kAny);
  v("count", device.count, Rule::kPositive);
  v("read_bytes_per_s", device.read_bytes_per_s, Rule::kPositive);
  v("write_bytes_per_s", device.write_bytes_per_s, Rule::kPositive);
  v("mixed_efficiency", device.mixed_efficiency, Rule::kShare);
  v("write_amplification", device.write_amplification, Rule::kPositive);
  v("burst_bytes", device.burst_bytes, Rule::kNotNegative);
  v("cores_bytes_per_s", device.cores_bytes_per_s, Rule::kNotNegative);
  v("sync_bytes_per_s", device.sync_bytes_per_s, Rule::kNotNegative);
  v("link_bytes_per_s", device.link_bytes_per_s, Rule::kPositive);
  v("latency_s", device.latency_s, Rule::kNotNegative);
  v("remote", device.remote, Rule::kAny);
  v("update_bytes_per_s", device.update_bytes_per_s, Rule::kNotNegative);
  v("decompress_bytes_per_s", device.decompress_bytes_per_s, Rule::kNotNegative);
  v("update_streams", device.update_streams, Rule::kAny);
  v("pipeline", device.pipeline, Rule::kAny);
  v("pairs_per_s", device.pairs_per_s, Rule::kNotNegative);
  v("kernel_clock_hz", device.kernel.clock_hz, Rule::kNotNegative);
  v("kernel_word_cycles", device.kernel.word_cycles, Rule::kPositive);
  v("kernel_banks", device.kernel.banks, Rule::kPositive);
  v("kernel_bank_bytes_per_s", device.kernel.bank_bytes_per_s, Rule::kNotNegative);
  v("kernel_bank_efficiency", device.kernel.bank_efficiency, Rule::kShare);
  v("weights_bytes_per_s", device.weights_bytes_per_s, Rule::kNotNegative);
  v("on_host_cores", device.on_host_cores, Rule::kAny);
  v("memory_bytes", device.memory_bytes, Rule::kNotNegative);
  v("capacity_bytes", device.capacity_bytes, Rule::kNotNegative);
  v("endurance_bytes", device.endurance_bytes, Rule::kNotNegative);
  v("price", device.price, Rule::kNotNegative);
}

template <typename Visitor>
void visit(Visitor& v, Network& network) {
  v("bytes_per_s", network.bytes_per_s, Rule::kNotNegative);
  v("latency_s", network.latency_s, Rule::kNotNegative);
  v("near_bytes_per_s", network.near_bytes_per_s, Rule::kNotNegative);
  v("cores_bytes_per_s", network.cores_bytes_per_s, Rule::kNotNegative);
}

template <typename Visitor>
void visit(Visitor& v, Software& software) {
  v("update_start_s", software.update_start_s, Rule::kNotNegative);
  v("subgroup_elements", software.subgroup_elements, Rule::kPositive);
  v("slots", software.slots, Rule::kPositive);
  v("gradient_bytes", software.gradient_bytes, Rule::kPositive);
  v("weight_bytes", software.weight_bytes, Rule::kPositive);
  v("overlapped", software.overlapped, Rule::kAny);
  v("gradient_spilled", software.gradient_spilled, Rule::kAny);
  v("offload_waits", software.offload_waits, Rule::kAny);
}

template <typename Visitor>
void visit(Visitor& v, Price& price) {
  v("host", price.host, Rule::kNotNegative);
  v("gpu", price.gpu, Rule::kNotNegative);
  v("power_watts", price.power_watts, Rule::kNotNegative);
  v("per_kwh", price.per_kwh, Rule::kNotNegative);
  v("life_years", price.life_years, Rule::kPositive);
}

/// The tables of the file that are there once, in the order in which they are written.
template <typename SomeMachine, typename Use>
Status each_table(SomeMachine& machine, Use use) {
  SI_RETURN_IF_ERROR(use("gpu", machine.gpu));
  SI_RETURN_IF_ERROR(use("host", machine.host));
  SI_RETURN_IF_ERROR(use("network", machine.network));
  SI_RETURN_IF_ERROR(use("software", machine.software));
  return use("price", machine.price);
}

Status broken_rule(std::string_view section, std::string_view key, double value, Rule rule) {
  const char* wanted = nullptr;
  if (rule == Rule::kPositive && value <= 0) wanted = "above zero";
  if (rule == Rule::kNotNegative && value < 0) wanted = "not negative";
  if (rule == Rule::kShare && (value <= 0 || value > 1)) wanted = "above 0 and at most 1";
  if (!std::isfinite(value)) wanted = "a finite number";
  if (wanted == nullptr) return {};
  return Status(ErrorCode::kInvalidArgument, fmt::format("{}.{} is {}", section, key, value),
                fmt::format("It must be {}.", wanted));
}

struct Checker {
  std::string_view section;
  Status status;

  template <typename T>
  void operator()(const char* key, T& value, Rule rule) {
    if constexpr (std::is_arithmetic_v<T>) {
      if (status.ok()) status = broken_rule(section, key, static_cast<double>(value), rule);
    }
  }
};

/// Reads the keys of one table; what is left over afterwards is unknown.
struct Reader {
  const toml::table& table;
  std::string_view section;
  std::string_view origin;
  Status status = {};
  std::vector<std::string_view> known = {};

  void fail(const toml::node* node, std::string_view key, std::string what, std::string advice) {
    if (!status.ok()) return;
    const uint32_t line = node != nullptr ? static_cast<uint32_t>(node->source().begin.line) : 0;
    status = Status(ErrorCode::kInvalidArgument,
                    line > 0 ? fmt::format("{} line {}: {}.{} {}", origin, line, section, key, what)
                             : fmt::format("{}: {}.{} {}", origin, section, key, what),
                    std::move(advice));
  }

  template <typename T>
  void operator()(const char* key, T& value, Rule rule) {
    known.push_back(key);
    const toml::node* node = table.get(key);
    if (node == nullptr) return;
    if constexpr (std::is_same_v<T, bool>) {
      if (!node->is_boolean())
        return fail(node, key, "is not true or false", "Write true or false.");
      value = *node->value<bool>();
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (!node->is_string()) return fail(node, key, "is not a text", "Put it in quotes.");
      value = *node->value<std::string>();
    } else if constexpr (std::is_same_v<T, plan::ScheduleVariant>) {
      const auto text = node->value<std::string>();
      const auto variant =
          base::enum_from_name<plan::ScheduleVariant>(text.value_or(std::string()));
      if (!variant) {
        return fail(node, key, "is not a schedule",
                    text == "late" ? "Write paper: the schedule that earlier versions called late."
                                   : fmt::format("Write {}.", fmt::join(enum_names(value), ", ")));
      }
      value = *variant;
    } else {
      double number = 0;
      if (node->is_string()) {
        const Result<uint64_t> bytes = base::parse_bytes(*node->value<std::string>());
        if (!bytes.ok()) return fail(node, key, "is not a number", "Write e.g. 4e9 or \"4GB\".");
        number = static_cast<double>(*bytes);
      } else if (node->is_integer() || node->is_floating_point()) {
        number = *node->value<double>();
      } else {
        return fail(node, key, "is not a number", "Write e.g. 4e9.");
      }
      const Status broken = broken_rule(section, key, number, rule);
      if (!broken.ok()) {
        const std::string prefix = fmt::format("{}.{} ", section, key);
        return fail(node, key, broken.what().substr(prefix.size()), broken.advice());
      }
      if constexpr (std::is_integral_v<T>) {
        if (number > (sizeof(T) == 4 ? 4e9 : 1.8e19)) {
          return fail(node, key, "is too large", "Give a smaller number.");
        }
        if (number != std::floor(number)) {
          return fail(node, key, "is not a whole number", "Write it without a fraction.");
        }
      }
      value = static_cast<T>(number);
    }
  }

  Status finish() {
    if (!status.ok()) return status;
    for (const auto& [key, node] : table) {
      const std::string_view name = key.str();
      if (std::find(known.begin(), known.end(), name) != known.end()) continue;
      const std::string_view nearest = base::nearest_name(name, known);
      fail(&node, name, "is not a key of a machine file",
           nearest.empty() ? fmt::format("Keys of [{}]: {}.", section, fmt::join(known, ", "))
                           : fmt::format("Did you mean {}?", nearest));
      break;
    }
    return status;
  }
};

struct Meaning {
  std::string_view section;
  std::string_view key;
  std::string_view text;
};

/// Comments of written files, for keys whose names do not say it all.
constexpr auto kMeanings = std::to_array<Meaning>({
    Meaning{"gpu", "name", "\"none\": no GPU, the host's cores compute"},
    Meaning{"gpu", "memory_bytes", "of one"},
    Meaning{"gpu", "peak_flops", "16-bit matrix products, dense"},
    Meaning{"gpu", "product_efficiency", "share of the peak that large products reach"},
    Meaning{"gpu", "memory_bytes_per_s", "its own memory"},
    Meaning{"gpu", "activation_passes",
            "times that what lies between products goes through that memory"},
    Meaning{"gpu", "select_passes",
            "times that a gradient does where the GPU selects for compression"},
    Meaning{"gpu", "link_bytes_per_s", "to the host, each direction"},
    Meaning{"gpu", "links_shared", "several GPUs behind one such link"},
    Meaning{"gpu", "link_is_host_link", "and that link is the devices' as well"},
    Meaning{"host", "link_bytes_per_s", "shared by all devices, each direction"},
    Meaning{"host", "update_bytes_per_s", "update on the host: state and gradient in, state out"},
    Meaning{"host", "copy_bytes_per_s", "one thread's copies around the host link"},
    Meaning{"host", "weights_bytes_per_s",
            "new weights of all devices, where those have weights_bytes_per_s"},
    Meaning{"host", "select_params_per_s", "compression on the host's cores; 0: the GPU does it"},
    Meaning{"host", "step_ahead_params_per_s",
            "one pass over new weights with compression; 0: none"},
    Meaning{"host", "process_bytes", "resident before there is a model: torch and the runtime"},
    Meaning{"device", "read_bytes_per_s", "alone, for long"},
    Meaning{"device", "write_bytes_per_s", "alone, for long, after the drive's cache"},
    Meaning{"device", "mixed_efficiency", "share that is left while it reads and writes at once"},
    Meaning{"device", "write_amplification", "bytes written inside the drive for each byte"},
    Meaning{"device", "burst_bytes", "written at the read rate after an idle time"},
    Meaning{"device", "link_bytes_per_s", "its own link to the host, each direction"},
    Meaning{"device", "latency_s", "of one command"},
    Meaning{"device", "remote", "in a server on the network, whose one link is theirs together"},
    Meaning{"device", "update_bytes_per_s",
            "processor: state and gradient in; 0: it cannot update"},
    Meaning{"device", "decompress_bytes_per_s",
            "processor with compressed gradients; 0: it cannot"},
    Meaning{"device", "cores_bytes_per_s",
            "that all cores could read and write; 0: it takes no time of theirs"},
    Meaning{"device", "sync_bytes_per_s",
            "bytes that a step writes, over the time of its sync; 0: it takes no time"},
    Meaning{"device", "update_streams", "it updates a part of the state while that is being read"},
    Meaning{"device", "pipeline",
            "an element takes as long with any rule: the rates are Adam's in f32"},
    Meaning{"device", "weights_bytes_per_s",
            "of its new weights, by the host's thread for them; 0: copy_bytes_per_s of the host"},
    Meaning{"device", "pairs_per_s",
            "compressed elements beyond 1 % that a pipeline puts in place"},
    Meaning{"device", "kernel_clock_hz",
            "its processor is the kernels of fpga/, in place of rates; 0: it is not"},
    Meaning{"device", "kernel_word_cycles", "of the update, for 16 elements"},
    Meaning{"device", "kernel_banks", "of the card's memory, over which planes are spread"},
    Meaning{"device", "kernel_bank_efficiency", "share left where reads and writes mix"},
    Meaning{"device", "on_host_cores", "its processor is the cores that compute without a GPU"},
    Meaning{"device", "endurance_bytes", "rated bytes written over its life; 0: not known"},
    Meaning{"network", "bytes_per_s", "of one machine, each direction; 0: none"},
    Meaning{"network", "latency_s", "of one message"},
    Meaning{"network", "near_bytes_per_s",
            "all that ranks of one machine send each other; 0: no limit"},
    Meaning{
        "network", "cores_bytes_per_s",
        "that all cores could send and receive of remote devices; 0: it takes no time of theirs"},
    Meaning{"software", "update_start_s",
            "from the last gradient until the devices begin to update"},
    Meaning{"software", "subgroup_elements", "parameters read, updated and written at once"},
    Meaning{"software", "slots", "of those in flight on a device"},
    Meaning{"software", "gradient_bytes", "of a parameter, on the host link"},
    Meaning{"software", "weight_bytes", "of a parameter, on the way back"},
    Meaning{"software", "overlapped", "schedule that su+o means"},
    Meaning{"software", "gradient_spilled", "gradients wait on the drive, not in memory"},
    Meaning{"software", "offload_waits", "backward stands still while a layer's gradients leave"},
    Meaning{"price", "host", "in any currency, without GPU and drives"},
    Meaning{"price", "gpu", "of one"},
    Meaning{"price", "life_years", "of machine and GPU"},
});

struct Writer {
  std::string text = {};
  std::string_view section = {};

  template <typename T>
  void operator()(const char* key, T& value, Rule) {
    std::string line;
    if constexpr (std::is_same_v<T, std::string>) {
      line = fmt::format("{} = '{}'", key, value);
    } else if constexpr (std::is_same_v<T, plan::ScheduleVariant>) {
      line = fmt::format("{} = '{}'", key, base::enum_name(value));
    } else if constexpr (std::is_floating_point_v<T>) {
      // A number that TOML takes for a float in every case, with all its digits.
      const std::string digits = fmt::format("{}", value);
      const bool is_float = digits.find_first_of(".e") != std::string::npos;
      line = fmt::format("{} = {}{}", key, digits, is_float ? "" : ".0");
    } else {
      line = fmt::format("{} = {}", key, value);
    }
    const auto known = std::ranges::find_if(kMeanings, [&](const Meaning& meaning) {
      return meaning.section == section && meaning.key == key;
    });
    text += known == kMeanings.end() ? line : fmt::format("{:<36}  # {}", line, known->text);
    text += "\n";
  }
};

template <typename T>
Status read_section(const toml::node& node, std::string_view section, std::string_view origin,
                    T& target) {
  const toml::table* table = node.as_table();
  if (table == nullptr) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} is not a table", origin, section),
                  fmt::format("Write [{}] and its keys below.", section));
  }
  Reader reader{*table, section, origin};
  if constexpr (std::is_same_v<T, Gpu>) {
    std::string preset;
    reader("preset", preset, Rule::kAny);
    if (!preset.empty()) {
      const uint32_t count = target.count;
      SI_ASSIGN_OR_RETURN(target, gpu_preset(preset));
      target.count = count;
    }
  }
  visit(reader, target);
  return reader.finish();
}

template <typename T>
Status check_section(std::string_view section, const T& value) {
  Checker checker{section, {}};
  T copy = value;
  visit(checker, copy);
  return std::move(checker.status);
}

// Data-sheet values: dense 16-bit tensor rate with 32-bit sums, memory, link of PCIe generation
// x16. What the link carries of its label is measured on the paper's machine (PCIe 4.0) and scaled
// with the label.
Gpu make_gpu(const char* name, double memory_gb, double tflops, double memory_gb_s,
             double link_gb_s) {
  Gpu gpu;
  gpu.name = name;
  gpu.memory_bytes = static_cast<uint64_t>(memory_gb * 1e9);
  gpu.peak_flops = tflops * 1e12;
  gpu.memory_bytes_per_s = memory_gb_s * 1e9;
  gpu.link_bytes_per_s = link_gb_s * 1e9;
  return gpu;
}

const std::vector<Gpu>& gpu_table() {
  static const std::vector<Gpu> table{
      make_gpu("A5000", 24, 111.1, 768, kPcie4x16GbPerS),
      make_gpu("A4000", 16, 76.7, 448, kPcie4x16GbPerS),
      make_gpu("A100", 40, 312, 1555, kPcie4x16GbPerS),
      make_gpu("A100-80GB", 80, 312, 2039, kPcie4x16GbPerS),
      make_gpu("RTX3090", 24, 71, 936, kPcie4x16GbPerS),
      make_gpu("RTX4090", 24, 165, 1008, kPcie4x16GbPerS),
      make_gpu("RTX5090", 32, 210, 1792, 2 * kPcie4x16GbPerS),
      make_gpu("L40S", 48, 362, 864, kPcie4x16GbPerS),
      make_gpu("H100", 80, 989, 3350, 2 * kPcie4x16GbPerS),
      make_gpu("H200", 141, 989, 4800, 2 * kPcie4x16GbPerS),
  };
  return table;
}

}  // namespace

uint32_t Machine::device_count() const {
  uint32_t count = 0;
  for (const DeviceGroup& group : devices) count += group.count;
  return count;
}

bool Machine::can_update() const {
  return std::all_of(devices.begin(), devices.end(),
                     [](const DeviceGroup& device) { return device.updates(); });
}

bool Machine::has_remote() const {
  return std::any_of(devices.begin(), devices.end(),
                     [](const DeviceGroup& device) { return device.remote; });
}

std::vector<const DeviceGroup*> Machine::each_device() const {
  std::vector<const DeviceGroup*> all;
  for (const DeviceGroup& group : devices) all.insert(all.end(), group.count, &group);
  return all;
}

std::vector<std::string_view> gpu_preset_names() {
  std::vector<std::string_view> names;
  for (const Gpu& gpu : gpu_table()) names.push_back(gpu.name);
  return names;
}

Result<Gpu> gpu_preset(std::string_view name) {
  for (const Gpu& gpu : gpu_table()) {
    if (base::same_name(gpu.name, name)) return gpu;
  }
  const std::vector<std::string_view> names = gpu_preset_names();
  // "4090" is the one whose name ends so.
  const Gpu* meant = nullptr;
  size_t meanings = 0;
  for (const Gpu& gpu : gpu_table()) {
    if (name.size() < 3 || gpu.name.size() < name.size()) continue;
    if (!base::same_name(std::string_view(gpu.name).substr(gpu.name.size() - name.size()), name)) {
      continue;
    }
    meant = &gpu;
    ++meanings;
  }
  if (meanings == 1) return *meant;
  const std::string_view nearest = base::nearest_name(name, names);
  return Status(ErrorCode::kNotFound, fmt::format("unknown GPU '{}'", name),
                nearest.empty() ? fmt::format("Known: {}.", fmt::join(names, ", "))
                                : fmt::format("Did you mean {}?", nearest));
}

std::vector<std::string_view> machine_preset_names() {
  std::vector<std::string_view> names;
  for (const MachinePreset& preset : machine_presets()) names.push_back(preset.name);
  return names;
}

Result<Machine> load_machine(std::string_view name_or_path) {
  const bool is_path =
      name_or_path.find('/') != std::string_view::npos || name_or_path.ends_with(".toml");
  if (is_path) {
    const std::string path(name_or_path);
    base::ErrorPlace place;
    place.path = path;
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) {
      return Status(ErrorCode::kInvalidArgument, "the machine file is a directory",
                    "Name a .toml file in it.", std::move(place));
    }
    SI_ASSIGN_OR_RETURN(const std::string text,
                        base::read_text_file(path, "cannot read the machine file"));
    return parse_machine(text, path);
  }
  for (const MachinePreset& preset : machine_presets()) {
    if (base::same_name(preset.name, name_or_path)) return parse_machine(preset.toml, preset.name);
  }
  const std::vector<std::string_view> names = machine_preset_names();
  const std::string_view nearest = base::nearest_name(name_or_path, names);
  return Status(ErrorCode::kNotFound, fmt::format("unknown machine '{}'", name_or_path),
                nearest.empty()
                    ? fmt::format("Known: {}; or give a .toml file.", fmt::join(names, ", "))
                    : fmt::format("Did you mean {}? Or give a .toml file.", nearest));
}

Result<Machine> parse_machine(std::string_view toml_text, std::string_view origin) {
  Machine machine;
  machine.origin = std::string(origin);
  machine.name = std::string(origin);
  const toml::parse_result parsed = toml::parse(toml_text, origin);
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{} line {}: {}", origin, static_cast<uint32_t>(error.source().begin.line),
                    error.description()),
        "A machine file is TOML; `smartinf simulate --print-machine` shows one.");
  }
  const toml::table& root = parsed.table();
  std::vector<std::string_view> sections{"name", "note", "device"};
  for (const auto& [key, text] : {std::pair{"name", &machine.name}, {"note", &machine.note}}) {
    const toml::node* node = root.get(key);
    if (node == nullptr) continue;
    if (!node->is_string()) {
      return Status(ErrorCode::kInvalidArgument, fmt::format("{}: {} is not a text", origin, key),
                    "Put it in quotes.");
    }
    *text = *node->value<std::string>();
  }
  SI_RETURN_IF_ERROR(each_table(machine, [&](std::string_view section, auto& target) -> Status {
    sections.push_back(section);
    const toml::node* node = root.get(section);
    return node == nullptr ? Status() : read_section(*node, section, origin, target);
  }));
  if (const toml::node* node = root.get("device"); node != nullptr) {
    const toml::array* array = node->as_array();
    if (array == nullptr) {
      return Status(ErrorCode::kInvalidArgument, fmt::format("{}: device is not a list", origin),
                    "Write [[device]], once for each kind of device.");
    }
    for (const toml::node& entry : *array) {
      DeviceGroup group;
      SI_RETURN_IF_ERROR(read_section(entry, "device", origin, group));
      machine.devices.push_back(group);
    }
  }
  for (const auto& [key, node] : root) {
    const std::string_view section = key.str();
    if (std::find(sections.begin(), sections.end(), section) != sections.end()) continue;
    const std::string_view nearest = base::nearest_name(section, sections);
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} line {}: '{}' is not a section of a machine file", origin,
                              static_cast<uint32_t>(node.source().begin.line), section),
                  nearest.empty() ? fmt::format("Sections: {}.", fmt::join(sections, ", "))
                                  : fmt::format("Did you mean {}?", nearest));
  }
  SI_RETURN_IF_ERROR(check_machine(machine).with_context(origin));
  return machine;
}

std::string machine_to_toml(const Machine& machine) {
  Machine copy = machine;
  Writer writer;
  writer("name", copy.name, Rule::kAny);
  if (!copy.note.empty()) writer("note", copy.note, Rule::kAny);
  (void)each_table(copy, [&](std::string_view section, auto& table) {
    writer.text += fmt::format("\n[{}]\n", section);
    writer.section = section;
    visit(writer, table);
    return Status();
  });
  for (DeviceGroup& group : copy.devices) {
    writer.text += "\n[[device]]\n";
    writer.section = "device";
    visit(writer, group);
  }
  return std::move(writer.text);
}

Status check_machine(const Machine& machine) {
  SI_RETURN_IF_ERROR(each_table(machine, [](std::string_view section, auto& table) {
    return check_section(section, table);
  }));
  if (machine.devices.empty()) {
    return Status(ErrorCode::kInvalidArgument, "the machine has no device", "Add a [[device]].");
  }
  for (const DeviceGroup& group : machine.devices) {
    SI_RETURN_IF_ERROR(check_section("device", group));
    const bool rates = group.update_bytes_per_s > 0 || group.decompress_bytes_per_s > 0;
    if (group.kernel.clock_hz > 0 && (rates || group.kernel.bank_bytes_per_s <= 0)) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("device '{}' has kernel_clock_hz and {}", group.name,
                                rates ? "a rate of its processor" : "no kernel_bank_bytes_per_s"),
                    "With kernel_clock_hz the rate follows from cycles and the card's memory: give "
                    "kernel_bank_bytes_per_s, and neither update_bytes_per_s nor "
                    "decompress_bytes_per_s.");
    }
  }
  if (machine.has_remote() && machine.network.bytes_per_s <= 0) {
    return Status(ErrorCode::kInvalidArgument, "a device is remote, but there is no network",
                  "Write [network] and bytes_per_s, the rate of this machine's own interface.");
  }
  if (machine.device_count() > 4096) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{} devices are more than the simulator takes", machine.device_count()),
        "Give at most 4096.");
  }
  return {};
}

}  // namespace smartinf::sim
