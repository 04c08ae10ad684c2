#include "smartinf/engine/memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include <unistd.h>

#include "smartinf/base/units.h"
#include "smartinf/plan/memory_plan.h"

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
  // A group's path in a unified hierarchy (cgroup v2): "0::/path". A group without a limit says
  // "max".
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;
    std::filesystem::path folder = "/sys/fs/cgroup" + line.substr(3);
    for (; folder != "/sys/fs/cgroup" && folder.has_relative_path();
         folder = folder.parent_path()) {
      uint64_t limit = 0;
      uint64_t used = 0;
      if (!(std::ifstream(folder / "memory.max") >> limit)) continue;
      if (!(std::ifstream(folder / "memory.current") >> used)) continue;
      available = std::min(available, limit - std::min(limit, used));
    }
  }
  return available;
}

}  // namespace smartinf::engine
