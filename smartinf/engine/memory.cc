#include "smartinf/engine/memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include <unistd.h>

#include "smartinf/base/units.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/storage/tuning.h"

namespace smartinf::engine {

std::vector<base::PlaneKind> state_planes(kernels::UpdateRule rule, bool residual) {
  const auto planes = kernels::rule_planes(rule);
  std::vector<base::PlaneKind> all(planes.begin(), planes.end());
  if (residual) all.push_back(base::PlaneKind::kResidual);
  return all;
}

uint64_t state_bytes(kernels::UpdateRule rule, base::StateFormat format, uint64_t elements,
                     bool residual) {
  return plan::state_bytes(format, state_planes(rule, residual), elements);
}

uint32_t gradient_spill_bytes(const UpdaterOptions& options, const plan::ParameterSpace& space) {
  const auto value_bytes = static_cast<uint32_t>(base::data_type_bytes(options.gradient_type));
  const bool fit = space.count() * value_bytes <= options.gradient_budget_bytes;
  const bool stay = options.compress.on() || (fit && !options.gradient_room);
  return stay ? 0 : value_bytes;
}

base::Result<plan::MemoryPlan> plan_buffers(const UpdaterOptions& options,
                                            const plan::ParameterSpace& space, uint32_t devices) {
  plan::MemoryPlanInput input;
  input.budget_bytes = options.memory_budget_bytes;
  input.elements = space.count();
  input.devices = devices;
  input.format = options.format;
  input.planes = state_planes(options.rule.rule, options.compress.residual_on_devices());
  input.gradient_spill_bytes = gradient_spill_bytes(options, space);
  input.subgroup_elements = options.subgroup_elements;
  input.weight_read_slots = options.stream_weights ? plan::kWeightReadSlots : 0;
  return plan::plan_memory(input);
}

std::optional<uint64_t> known_in_flight_bytes(const UpdaterOptions& options) {
  const storage::IoTuning usual;
  uint64_t most = 0;
  for (const DeviceOptions& device : options.devices) {
    const bool emulated = device.internal_link.given() || options.host_link.given();
    const bool given = options.io_bytes != 0 && options.io_depth != 0;
    const std::optional<storage::IoTuning> tuned =
        given || emulated ? usual : storage::recall_tuning(device.path);
    if (!tuned) return std::nullopt;
    const uint64_t bytes = options.io_bytes != 0 ? options.io_bytes : tuned->io_bytes;
    most = std::max(most, bytes * (options.io_depth != 0 ? options.io_depth : tuned->io_depth));
  }
  return most;
}

bool rates_are_known(const UpdaterOptions& options) {
  return std::ranges::all_of(options.devices, [](const DeviceOptions& device) {
    return device.bandwidth > 0 || storage::recall_tuning(device.path).has_value();
  });
}

uint64_t host_memory_bytes() {
  return static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

uint64_t resident_memory_bytes() {
  uint64_t all = 0;
  uint64_t resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

uint64_t peak_memory_bytes() {
  // getrusage() would count what the process was before exec() as well.
  std::ifstream status("/proc/self/status");
  for (std::string name; status >> name;) {
    uint64_t kib = 0;
    if (name == "VmHWM:" && status >> kib) return kib * base::kKiB;
    std::getline(status, name);
  }
  return 0;
}

uint64_t available_memory_bytes() {
  uint64_t available = host_memory_bytes();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string name; meminfo >> name;) {
    if (name != "MemAvailable:") {
      std::getline(meminfo, name);
      continue;
    }
    uint64_t kib = 0;
    if (meminfo >> kib) available = kib * base::kKiB;
    break;
  }
  // A group's path in a unified hierarchy (cgroup v2) is "0::/path", in that of memory (v1)
  // "4:memory:/path". A group without a limit says "max".
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const bool unified = line.starts_with("0::");
    const size_t path = line.find(":memory:/");
    if (!unified && path == std::string::npos) continue;
    const std::filesystem::path top = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    std::filesystem::path folder = top.string() + line.substr(unified ? 3 : path + 8);
    for (; folder != top && folder.has_relative_path(); folder = folder.parent_path()) {
      uint64_t limit = 0;
      uint64_t used = 0;
      const char* const most = unified ? "memory.max" : "memory.limit_in_bytes";
      if (!(std::ifstream(folder / most) >> limit)) continue;
      const char* const current = unified ? "memory.current" : "memory.usage_in_bytes";
      if (!(std::ifstream(folder / current) >> used)) continue;
      // Pages of files that are not mapped are dropped for others.
      std::ifstream stat(folder / "memory.stat");
      uint64_t bytes = 0;
      for (std::string name; stat >> name >> bytes;) {
        if (name == (unified ? "inactive_file" : "total_inactive_file")) {
          used -= std::min(used, bytes);
        }
      }
      available = std::min(available, limit - std::min(limit, used));
    }
  }
  return available;
}

}  // namespace smartinf::engine
