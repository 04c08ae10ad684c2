#include "smartinf/sim/machine.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <span>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "smartinf/base/file.h"
#include "smartinf/base/key_table.h"
#include "smartinf/base/nearest.h"
#include "smartinf/sim/machine_presets.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr size_t kDevicesMax = 4096;

using base::NamedField;

constexpr double kEndless = std::numeric_limits<double>::infinity();

template <typename T>
base::Number positive(T& value) {
  return {&value, std::numeric_limits<double>::denorm_min(), kEndless, "above zero"};
}
template <typename T>
base::Number not_negative(T& value) {
  return {&value, 0, kEndless, "that is not negative"};
}
base::Number share(double& value) {
  return {&value, std::numeric_limits<double>::denorm_min(), 1, "above 0 and at most 1"};
}

// Every key of the file, once: reading, writing and checking follow from these. The last is a
// comment of written files, where a name does not say it all.
std::vector<NamedField> fields_of(Gpu& gpu) {
  return {
      {"name", &gpu.name, "\"none\": no GPU, the host's cores compute"},
      {"count", positive(gpu.count)},
      {"memory_bytes", not_negative(gpu.memory_bytes), "of one"},
      {"peak_flops", positive(gpu.peak_flops), "16-bit matrix products, dense"},
      {"product_efficiency", share(gpu.product_efficiency),
       "share of the peak that large products reach"},
      {"memory_bytes_per_s", positive(gpu.memory_bytes_per_s), "its own memory"},
      {"activation_passes", not_negative(gpu.activation_passes),
       "times that what lies between products goes through that memory"},
      {"select_passes", not_negative(gpu.select_passes),
       "times that a gradient does where the GPU selects for compression"},
      {"link_bytes_per_s", positive(gpu.link_bytes_per_s), "to the host, each direction"},
      {"links_shared", &gpu.links_shared, "several GPUs behind one such link"},
      {"link_is_host_link", &gpu.link_is_host_link, "and that link is the devices' as well"},
  };
}

std::vector<NamedField> fields_of(Host& host) {
  return {
      {"memory_bytes", not_negative(host.memory_bytes)},
      {"link_bytes_per_s", positive(host.link_bytes_per_s),
       "shared by all devices, each direction"},
      {"update_bytes_per_s", positive(host.update_bytes_per_s),
       "update on the host: state and gradient in, state out"},
      {"weights_bytes_per_s", not_negative(host.weights_bytes_per_s),
       "new weights of all devices, where those have weights_bytes_per_s"},
      {"copy_bytes_per_s", positive(host.copy_bytes_per_s),
       "one thread's copies around the host link"},
      {"select_params_per_s", not_negative(host.select_params_per_s),
       "compression on the host's cores; 0: the GPU does it"},
      {"step_ahead_params_per_s", not_negative(host.step_ahead_params_per_s),
       "one pass over new weights with compression; 0: none"},
      {"decode_flops", not_negative(host.decode_flops),
       "products of few rows on all cores; 0: as [gpu] says"},
      {"decode_bytes_per_s", not_negative(host.decode_bytes_per_s), "weights of such products"},
      {"decode_value_s", not_negative(host.decode_value_s),
       "an output of such a product and row, with what lies between products; 0: a quarter more"},
      {"decode_product_s", not_negative(host.decode_product_s), "such a product by itself"},
      {"row_s", not_negative(host.row_s),
       "of a row number of a table: sorting it, adding its gradient up"},
      {"process_bytes", not_negative(host.process_bytes),
       "resident before there is a model: torch and the runtime"},
  };
}

std::vector<NamedField> fields_of(DeviceGroup& device) {
  return {
      {"name", &device.name},
      {"count", positive(device.count)},
      {"read_bytes_per_s", positive(device.read_bytes_per_s), "alone, for long"},
      {"reads_only_bytes_per_s", not_negative(device.reads_only_bytes_per_s),
       "of generation, where reads alone are slower than both ways together; 0: they are not"},
      {"write_bytes_per_s", positive(device.write_bytes_per_s),
       "alone, for long, after the drive's cache"},
      {"mixed_efficiency", share(device.mixed_efficiency),
       "share that is left while it reads and writes at once"},
      {"write_amplification", positive(device.write_amplification),
       "bytes written inside the drive for each byte"},
      {"burst_bytes", not_negative(device.burst_bytes),
       "written at the read rate after an idle time"},
      {"cores_bytes_per_s", not_negative(device.cores_bytes_per_s),
       "that all cores could read and write; 0: it takes no time of theirs"},
      {"sync_bytes_per_s", not_negative(device.sync_bytes_per_s),
       "bytes that a step writes, over the time of its sync; 0: it takes no time"},
      {"page_reads_per_s", not_negative(device.page_reads_per_s),
       "of 4096 bytes at random, as tables' rows are read; 0: as its bytes"},
      {"page_writes_per_s", not_negative(device.page_writes_per_s), "likewise"},
      {"sync_s", not_negative(device.sync_s), "a sync of little, of tables' rows"},
      {"page_s", not_negative(device.page_s),
       "one thread, to check a page and take up a row of it"},
      {"row_s", not_negative(device.row_s), "that thread, to find a row that is in memory"},
      {"row_bytes_per_s", not_negative(device.row_bytes_per_s),
       "that thread: records of rows updated and written to the log; 0: no limit"},
      {"link_bytes_per_s", positive(device.link_bytes_per_s),
       "its own link to the host, each direction"},
      {"latency_s", not_negative(device.latency_s), "of one command"},
      {"remote", &device.remote, "in a server on the network, whose one link is theirs together"},
      {"update_bytes_per_s", not_negative(device.update_bytes_per_s),
       "processor: state and gradient in; 0: it cannot update"},
      {"decompress_bytes_per_s", not_negative(device.decompress_bytes_per_s),
       "processor with compressed gradients; 0: it cannot"},
      {"fold_bytes_per_s", not_negative(device.fold_bytes_per_s),
       "processor: keys and values that it attends to, or all cores; 0: as it updates"},
      {"update_streams", &device.update_streams,
       "it updates a part of the state while that is being read"},
      {"pipeline", &device.pipeline,
       "an element takes as long with any rule: the rates are Adam's in f32"},
      {"pairs_per_s", not_negative(device.pairs_per_s),
       "compressed elements beyond 1 % that a pipeline puts in place"},
      {"kernel_clock_hz", not_negative(device.kernel.clock_hz),
       "its processor is the kernels of fpga/, in place of rates; 0: it is not"},
      {"kernel_word_cycles", positive(device.kernel.word_cycles), "of the update, for 16 elements"},
      {"kernel_banks", positive(device.kernel.banks),
       "of the card's memory, over which planes are spread"},
      {"kernel_bank_bytes_per_s", not_negative(device.kernel.bank_bytes_per_s)},
      {"kernel_bank_efficiency", share(device.kernel.bank_efficiency),
       "share left where reads and writes mix"},
      {"weights_bytes_per_s", not_negative(device.weights_bytes_per_s),
       "of its new weights, by the host's thread for them; 0: copy_bytes_per_s of the host"},
      {"on_host_cores", &device.on_host_cores,
       "its processor is the cores that compute without a GPU"},
      {"memory_bytes", not_negative(device.memory_bytes)},
      {"capacity_bytes", not_negative(device.capacity_bytes)},
      {"endurance_bytes", not_negative(device.endurance_bytes),
       "rated bytes written over its life; 0: not known"},
      {"price", not_negative(device.price)},
  };
}

std::vector<NamedField> fields_of(Network& network) {
  return {
      {"bytes_per_s", not_negative(network.bytes_per_s), "of one machine, each direction; 0: none"},
      {"latency_s", not_negative(network.latency_s), "of one message"},
      {"near_bytes_per_s", not_negative(network.near_bytes_per_s),
       "all that ranks of one machine send each other; 0: no limit"},
      {"cores_bytes_per_s", not_negative(network.cores_bytes_per_s),
       "that all cores could send and receive of remote devices; 0: it takes no time of theirs"},
      {"ranks_cores_bytes_per_s", not_negative(network.ranks_cores_bytes_per_s),
       "likewise between ranks of several machines"},
  };
}

std::vector<NamedField> fields_of(Software& software) {
  return {
      {"update_start_s", not_negative(software.update_start_s),
       "from the last gradient until the devices begin to update"},
      {"subgroup_elements", positive(software.subgroup_elements),
       "parameters read, updated and written at once"},
      {"slots", positive(software.slots), "of those in flight on a device"},
      {"in_flight_bytes", not_negative(software.in_flight_bytes),
       "of transfers that fill a drive, one way; 0: not measured, as many slots as said"},
      {"gradient_bytes", positive(software.gradient_bytes), "of a parameter, on the host link"},
      {"weight_bytes", positive(software.weight_bytes), "of a parameter, on the way back"},
      {"overlapped", base::by_name(software.overlapped), "schedule that su+o means"},
      {"buffered_row_s", not_negative(software.buffered_row_s),
       "to hand a device a head's row of values that waits in the host"},
      {"gradient_spilled", &software.gradient_spilled,
       "gradients wait on the drive, not in memory"},
      {"offload_waits", &software.offload_waits,
       "backward stands still while a layer's gradients leave"},
  };
}

std::vector<NamedField> fields_of(Price& price) {
  return {
      {"host", not_negative(price.host), "in any currency, without GPU and drives"},
      {"gpu", not_negative(price.gpu), "of one"},
      {"power_watts", not_negative(price.power_watts)},
      {"per_kwh", not_negative(price.per_kwh)},
      {"life_years", positive(price.life_years), "of machine and GPU"},
  };
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

/// As the file says it: numbers that TOML takes for floats in every case, texts in single quotes.
std::string format_plainly(const base::Field& field) {
  if (const auto* const* text = std::get_if<std::string*>(&field)) {
    return fmt::format("'{}'", **text);
  }
  std::string text = base::format_value(field);
  std::ranges::replace(text, '"', '\'');
  return text;
}

void write(std::string& text, std::span<const NamedField> fields) {
  for (const NamedField& field : fields) {
    const std::string line = fmt::format("{} = {}", field.name, format_plainly(field.field));
    text += field.help.empty() ? line : fmt::format("{:<36}  # {}", line, field.help);
    text += "\n";
  }
}

template <typename T>
Status check_table(std::string_view section, T value) {
  for (const NamedField& field : fields_of(value)) {
    const auto* number = std::get_if<base::Number>(&field.field);
    if (number == nullptr) continue;
    const double is = std::visit([](auto* at) { return static_cast<double>(*at); }, number->value);
    if (base::in_bounds(*number, is)) continue;
    return Status(ErrorCode::kInvalidArgument, fmt::format("{}.{} is {}", section, field.name, is),
                  fmt::format("It must be {}.", base::expected(field.field)));
  }
  return {};
}

/// The GPU that a file starts from, whose keys are then changed.
Status take_preset(base::TomlTable& table, Gpu& gpu) {
  const auto key = std::ranges::find(table.keys, "preset", &base::TomlTable::Key::name);
  if (key == table.keys.end()) return {};
  const auto* name = std::get_if<std::string>(&key->value.value);
  const uint32_t count = gpu.count;
  SI_ASSIGN_OR_RETURN(gpu, gpu_preset(name != nullptr ? *name : key->value.found));
  gpu.count = count;
  table.keys.erase(key);
  return {};
}

/// Reports names that earlier versions gave a schedule.
void take_former_words(const base::TomlTable& table, base::KeyReader& reader) {
  for (const base::TomlTable::Key& key : table.keys) {
    const auto* word = std::get_if<std::string>(&key.value.value);
    if (key.name != "overlapped" || word == nullptr || *word != "late") continue;
    reader.problem(key.value.at,
                   "software.overlapped: write \"paper\", the schedule that earlier versions "
                   "called \"late\"");
  }
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
  base::KeyReader reader(machine.origin);
  const std::vector<NamedField> texts{{"name", &machine.name}, {"note", &machine.note}};
  std::vector<std::string_view> sections{"name", "note", "device"};
  (void)each_table(machine, [&](std::string_view section, auto&) {
    sections.push_back(section);
    return Status();
  });
  for (base::TomlEntry& entry : reader.parse(toml_text)) {
    if (std::ranges::find(sections, entry.name) == sections.end()) {
      reader.problem(entry.at,
                     fmt::format("unknown section or key '{}'{}", base::excerpt(entry.name),
                                 base::did_you_mean(entry.name, sections)));
    } else if (entry.name == "name" || entry.name == "note") {
      reader.read("", base::TomlTable::Key{entry.name, entry.at, entry.value}, texts);
    } else if (entry.name == "device") {
      for (const base::TomlTable& table : reader.list_of(entry, kDevicesMax)) {
        reader.read("device", table, fields_of(machine.devices.emplace_back()));
      }
    } else if (entry.kind != base::TomlEntry::Kind::kTable) {
      reader.problem(entry.value.at,
                     fmt::format("{0} is a section: write [{0}] on a line of its own", entry.name));
    } else {
      base::TomlTable& table = entry.tables.front();
      if (entry.name == "gpu") SI_RETURN_IF_ERROR(take_preset(table, machine.gpu));
      if (entry.name == "software") take_former_words(table, reader);
      SI_RETURN_IF_ERROR(each_table(machine, [&](std::string_view section, auto& target) {
        if (section == entry.name) reader.read(section, table, fields_of(target));
        return Status();
      }));
    }
  }
  SI_RETURN_IF_ERROR(reader.status());
  SI_RETURN_IF_ERROR(check_machine(machine).with_context(origin));
  return machine;
}

std::string machine_to_toml(const Machine& machine) {
  Machine copy = machine;
  std::string text;
  write(text, std::vector<NamedField>{{"name", &copy.name}});
  if (!copy.note.empty()) write(text, std::vector<NamedField>{{"note", &copy.note}});
  (void)each_table(copy, [&](std::string_view section, auto& table) {
    text += fmt::format("\n[{}]\n", section);
    write(text, fields_of(table));
    return Status();
  });
  for (DeviceGroup& group : copy.devices) {
    text += "\n[[device]]\n";
    write(text, fields_of(group));
  }
  return text;
}

Status check_machine(const Machine& machine) {
  SI_RETURN_IF_ERROR(each_table(
      machine, [](std::string_view section, auto& table) { return check_table(section, table); }));
  if (machine.devices.empty()) {
    return Status(ErrorCode::kInvalidArgument, "the machine has no device", "Add a [[device]].");
  }
  for (const DeviceGroup& group : machine.devices) {
    SI_RETURN_IF_ERROR(check_table("device", group));
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
