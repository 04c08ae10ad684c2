#include "smartinf/sim/memory_need.h"

#include <algorithm>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/plan/memory_plan.h"

namespace smartinf::sim {
namespace {

/// For each parameter, in this software's error feedback (compress/gradient_compressor.h): the
/// step's gradient and what earlier ones did not send, in host memory; of these the second is a
/// plane of the state, too.
constexpr uint64_t kResidualBytes = 2;
constexpr uint64_t kCompressionBytes = 2 + kResidualBytes;

uint64_t share_of(uint64_t elements, const Machine& machine) {
  return base::divide_up(elements, std::max(1u, machine.device_count()));
}

/// What the engine keeps in the trainer's process: slots, staging, gradients that are not spilled,
/// cached state.
uint64_t engine_bytes(uint64_t parameters, const Machine& machine, const StepOptions& options) {
  const Software& software = machine.software;
  const bool compressed = host_selects(machine, options);
  const bool spilled = software.gradient_spilled && !compressed;
  plan::MemoryPlanInput input;
  input.elements = parameters;
  input.devices = std::max(1u, machine.device_count());
  input.format = options.format;
  const auto planes = kernels::rule_planes(options.rule);
  input.planes.assign(planes.begin(), planes.end());
  const uint64_t cache = std::min(options.state_cache_bytes,
                                  plan::state_bytes(options.format, input.planes, parameters));
  if (compressed) input.planes.push_back(base::PlaneKind::kResidual);
  input.gradient_spill_bytes = spilled ? software.gradient_bytes : 0;
  input.subgroup_elements = options.subgroup_elements;
  uint64_t buffers = input.budget_bytes;
  if (const auto memory = plan::plan_memory(input); memory.ok()) {
    plan::DeviceSlotsInput device;
    device.memory_bytes = memory->slots * memory->slot_bytes;
    device.slot_bytes = memory->slot_bytes;
    device.subgroups = base::divide_up(share_of(parameters, machine), memory->subgroup_elements);
    device.slots = options.slots;
    // The machine file says how many slots the transfers fill that were measured.
    if (device.slots == 0 && !spilled) device.slots = software.slots;
    device.gradients_spilled = spilled;
    buffers =
        memory->staging_bytes + input.devices * plan::device_slots(device) * memory->slot_bytes;
  }
  uint64_t gradients = 0;
  if (compressed) {
    gradients = kCompressionBytes * parameters;
  } else if (!spilled) {
    gradients = software.gradient_bytes * parameters;
  }
  return gradients + cache + buffers;
}

}  // namespace

std::string use_name(const TrainingUse& use) {
  if (use.program == plan::TrainingProgram::kTrain) return "smartinf train";
  return use.release_gradients ? "Python, release_gradients=True" : "Python";
}

MemoryNeed memory_need(const ModelShape& model, const Machine& machine, const StepOptions& options,
                       const TrainingUse& use) {
  // Python with torch and transformers beside what the machine file says of a program with torch.
  constexpr uint64_t kTransformersBytes = 330'000'000;
  constexpr uint64_t kProcessBytes = 420'000'000;  // where the machine file says nothing
  // Assumed: CUDA's libraries as a process has them in the host's memory.
  constexpr uint64_t kCudaHostBytes = 1'500'000'000;
  const Software& software = machine.software;
  const uint64_t parameters = model.parameters();
  const bool python = use.program == plan::TrainingProgram::kPython;
  const bool compressed_here = host_selects(machine, options);
  plan::TrainingMemoryInput input;
  input.model = model.training_model();
  input.program = use.program;
  input.gpu = machine.gpu.name != "none";
  input.value_bytes = options.value_bytes;
  input.recompute = use.recompute;
  input.accumulation = options.accumulation;
  input.release_gradients = use.release_gradients;
  // Master, momentum and variance, and all gradients once more, in f32.
  input.optimizer_bytes =
      use.in_memory ? 16 * parameters : engine_bytes(parameters, machine, options);
  input.process_bytes =
      machine.host.process_bytes != 0 ? machine.host.process_bytes : kProcessBytes;
  if (python) input.process_bytes += kTransformersBytes;
  if (input.gpu) input.process_bytes += kCudaHostBytes;
  const plan::TrainingMemory memory = plan::training_memory(input);
  MemoryNeed need;
  need.gpu_bytes = memory.accelerator_bytes;
  need.gpu_parts = memory.accelerator;
  // Of several ranks each has a flat buffer of all weights and a process; they share the rest.
  const uint64_t more_ranks = python ? machine.gpu.count - 1 : 0;
  need.host_bytes =
      memory.host_bytes + more_ranks * (input.value_bytes * parameters + input.process_bytes);
  need.host_parts = memory.host;
  if (more_ranks > 0) {
    need.host_parts.push_back({"the other ranks", need.host_bytes - memory.host_bytes});
  }
  const double state = state_bytes_per_parameter(options.rule, options.format);
  double kept = 2 * (state + (compressed_here ? kResidualBytes : 0));
  if (software.gradient_spilled && !compressed_here) kept += software.gradient_bytes;
  need.drive_bytes =
      static_cast<uint64_t>(kept * static_cast<double>(share_of(parameters, machine)));
  return need;
}

std::string shortfall_of(const MemoryNeed& need, const Machine& machine, const TrainingUse& use) {
  std::string text;
  const auto lacks = [&](const std::string& where, uint64_t needed, uint64_t have) {
    if (have == 0 || needed <= have) return;
    text += fmt::format("{}{} lacks {}", text.empty() ? "" : "; ", where,
                        base::format_bytes(needed - have));
  };
  if (machine.gpu.name != "none") lacks("GPU memory", need.gpu_bytes, machine.gpu.memory_bytes);
  lacks("host memory", need.host_bytes, machine.host.memory_bytes);
  for (const DeviceGroup& device : machine.devices) {
    lacks(device.name, need.drive_bytes, device.capacity_bytes);
  }
  if (text.empty() && use.program == plan::TrainingProgram::kTrain && machine.gpu.count > 1) {
    return "smartinf train computes on one GPU";
  }
  return text;
}

}  // namespace smartinf::sim
