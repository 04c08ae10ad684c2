#include "smartinf/sim/memory_need.h"

#include <algorithm>
#include <functional>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/plan/rank_share.h"
#include "smartinf/plan/slots.h"
#include "smartinf/plan/stage_plan.h"
#include "smartinf/sim/one_rank.h"

namespace smartinf::sim {
namespace {

/// For each parameter, in this software's error feedback (compress/gradient_compressor.h): the
/// step's gradient and what earlier ones did not send, in host memory; of these the second is a
/// plane of the state, too.
constexpr uint64_t kResidualBytes = 2;
constexpr uint64_t kCompressionBytes = 2 + kResidualBytes;

uint64_t share_of(uint64_t elements, const Machine& machine, const StepOptions& options) {
  return base::divide_up(elements, devices_of_all(machine, options));
}

/// The part of the rank that has most devices, of bytes that are for all devices.
uint64_t of_one_rank(uint64_t bytes, const Machine& machine, const StepOptions& options) {
  if (options.ranks == 1) return bytes;
  return plan::share_of_devices(bytes, devices_of_one(machine, options),
                                devices_of_all(machine, options));
}

/// As engine::plan_buffers asks; `streamed`: with room for reading weights, and for gradients of
/// which not all stay in memory.
plan::MemoryPlanInput buffers_input(uint64_t parameters, const Machine& machine,
                                    const StepOptions& options, bool spilled, bool streamed) {
  const bool compressed = host_selects(machine, options);
  plan::MemoryPlanInput input;
  input.elements = parameters;
  input.devices = static_cast<uint32_t>(devices_of_all(machine, options));
  input.format = options.format;
  const auto planes = kernels::rule_planes(options.rule);
  input.planes.assign(planes.begin(), planes.end());
  if (compressed) input.planes.push_back(base::PlaneKind::kResidual);
  input.gradient_spill_bytes = spilled && !compressed ? machine.software.gradient_bytes : 0;
  input.subgroup_elements = options.subgroup_elements;
  input.weight_read_slots = streamed && !compressed ? plan::kWeightReadSlots : 0;
  return input;
}

/// Bytes of a parameter's gradient on its way to the update: a model in f32 hands over f32.
uint64_t gradient_bytes_of(const Machine& machine, const StepOptions& options) {
  return options.value_bytes == 4 ? 4 : machine.software.gradient_bytes;
}

/// Of all that wait for the update on a rank; of a stage those that it adds up, whoever has the
/// state.
uint64_t all_gradient_bytes(uint64_t parameters, uint64_t of_stage, const Machine& machine,
                            const StepOptions& options) {
  const uint64_t each = gradient_bytes_of(machine, options);
  return std::max(of_one_rank(each * parameters, machine, options), each * of_stage);
}

uint64_t cache_bytes(uint64_t parameters, const StepOptions& options) {
  const auto planes = kernels::rule_planes(options.rule);
  return std::min(options.state_cache_bytes, plan::state_bytes(options.format, planes, parameters));
}

/// Slots and staging, with as many slots as the machine file says; without a plan the budget.
uint64_t engine_bytes(const plan::MemoryPlanInput& input, uint64_t parameters,
                      const Machine& machine, const StepOptions& options) {
  const auto memory = plan::plan_memory(input);
  if (!memory.ok()) return of_one_rank(input.budget_bytes, machine, options);
  plan::DriveSlots drives;
  drives.slots = options.slots;
  if (input.gradient_spill_bytes == 0) {
    const Software& software = machine.software;
    drives.in_flight_bytes = software.in_flight_bytes;
    if (software.in_flight_bytes == 0 && options.slots == 0) {
      drives.slots = std::max<uint32_t>(software.slots, plan::kSlotsEnough);
    }
  }
  const uint64_t bytes = plan::buffer_bytes(*memory, parameters, input.devices, drives);
  return memory->staging_bytes + of_one_rank(bytes - memory->staging_bytes, machine, options);
}

/// Why weights cannot come from the devices.
base::Status can_stream(const Machine& machine, const StepOptions& options,
                        const TrainingUse& use) {
  const auto cannot = [](const char* why) {
    return base::Status(base::ErrorCode::kUnsupported, why, "Let the devices update.");
  };
  if (use.in_memory) return cannot("nothing is stored on devices");
  if (options.method == Method::kBaseline) return cannot("the host updates");
  if (host_selects(machine, options) || options.method == Method::kSmartComp) {
    return cannot("gradients are compressed");
  }
  return {};
}

/// A streamed model of Python has a unit for each block (docs/streamed-models.md).
std::vector<plan::Unit> python_units(const ModelShape& model) {
  std::vector<plan::Unit> units{{0, model.embedding_parameters(), 0, 0}};
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    units.push_back({units.back().end(), model.layer_parameters(layer), layer, 1});
  }
  units.push_back({units.back().end(), model.head_parameters(), 0, 0});
  return units;
}

/// Decides what stays in memory and what streams, from the same inputs as train::plan_run. Sets the
/// padding of slots in memory. parameters: of the whole model; memory.model is a stage's where
/// there is a pipeline. state: of a subgroup's elements, what a stage has. buffers_budget:
/// engine.memory_budget.
using StateOf = std::function<plan::StageState(uint64_t subgroup_elements)>;
plan::TrainingPlan place(plan::TrainingMemoryInput& memory, uint64_t parameters,
                         const Machine& machine, const StepOptions& options, const TrainingUse& use,
                         uint64_t buffers_budget, const plan::Pipeline& pipeline = {},
                         const StateOf& state_of = {}) {
  const uint32_t chunks = pipeline.on() ? pipeline.stages.chunks : 0;
  plan::TrainingPlanInput input;
  const Software& software = machine.software;
  uint64_t optimizer_bytes = memory.optimizer_bytes;
  if (!use.in_memory) {
    const bool compressed = host_selects(machine, options);
    const auto asked = [&](bool spilled, bool streamed) {
      plan::MemoryPlanInput buffers =
          buffers_input(parameters, machine, options, spilled, streamed);
      buffers.budget_bytes = buffers_budget;
      return buffers;
    };
    const auto bytes = [&](bool spilled, bool streamed) {
      return engine_bytes(asked(spilled, streamed), parameters, machine, options);
    };
    const plan::MemoryPlanInput most = asked(true, true);
    if (const auto planned = plan::plan_memory(most); planned.ok()) {
      const uint64_t subgroup = planned->subgroup_elements;
      memory.slot_padding_bytes =
          memory.value_bytes *
          (chunks > 0 ? 2 * subgroup : plan::slot_padding_elements(memory.units, subgroup));
    }
    const uint64_t gradients = all_gradient_bytes(parameters, 0, machine, options);
    const uint64_t buffers =
        bytes(software.gradient_spilled || use.gradient_budget < gradients, false);
    const auto more = [&](uint64_t all) { return all - std::min(all, buffers); };
    input.stream_bytes = more(bytes(false, true));
    input.spill_bytes = more(bytes(true, true));
    optimizer_bytes = buffers + of_one_rank(cache_bytes(parameters, options), machine, options);
    plan::StageState state;
    if (const auto planned = plan::plan_memory(most); planned.ok() && options.ranks > 1) {
      state.exchange = {.elements = parameters,
                        .ranks = options.ranks,
                        .subgroup_elements = planned->subgroup_elements};
      if (chunks > 0) state = state_of(planned->subgroup_elements);
      state.exchange.value_bytes = memory.value_bytes;
      optimizer_bytes += plan::rank_bytes(parameters, state.exchange);
    }
    if (compressed) {
      optimizer_bytes += kCompressionBytes * parameters;
    } else {
      input.gradient_bytes = all_gradient_bytes(
          parameters, chunks > 0 ? memory.model.parameters : 0, machine, options);
      if (chunks == 1) {
        input.gradient_bytes =
            gradient_bytes_of(machine, options) * state.elements / pipeline.stages.replicas;
      }
      if (software.gradient_spilled) input.gradient_limit_bytes = 0;
      input.gradient_limit_bytes = std::min(input.gradient_limit_bytes, use.gradient_budget);
    }
  }
  input.memory = memory;
  input.memory.optimizer_bytes = optimizer_bytes;
  input.activations = use.recompute ? plan::Activations::kRecompute : plan::Activations::kKeep;
  input.streams = can_stream(machine, options, use);
  if (use.program == plan::TrainingProgram::kPython) {
    if (!use.streamed) input.streams = base::Status(base::ErrorCode::kUnsupported, "all stays");
    input.spools = false;
  } else {
    input.spools = machine.device_count() >= options.ranks / options.machines;
  }
  if (chunks > 0) {
    input.spools = false;
    // Subgroups in which a chunk meets those of other stages.
    input.memory.optimizer_bytes += (chunks - 1) * memory.slot_padding_bytes;
    if (chunks == 1) {
      input.streams = base::Status(base::ErrorCode::kUnsupported, "a stage keeps all in memory");
    }
  }
  if (machine.host.memory_bytes > 0) input.host_limit_bytes = host_limit_bytes(machine, options);
  if (memory.gpu && machine.gpu.memory_bytes > 0) {
    input.accelerator_limit_bytes = machine.gpu.memory_bytes;
  }
  return plan::place_training(input);
}

/// A streamed model of Python, with as many buffers as there is room for. Of its budget an eighth
/// is for the engine, within these bounds (python/smartinf/streaming.py); the rest is slots,
/// gradients and weights that stay.
plan::TrainingPlan place_streamed(plan::TrainingMemoryInput& memory, const Machine& machine,
                                  const StepOptions& options, const TrainingUse& use,
                                  uint64_t& memory_budget) {
  const uint64_t least = 64 * base::kMiB * (3 + 5 * uint64_t{machine.device_count()}) / 8;
  const uint64_t limit = host_limit_bytes(machine, options);
  uint64_t buffers = plan::kMemoryBudgetBytes;
  plan::TrainingPlan plan = place(memory, memory.model.parameters, machine, options, use, buffers);
  while (limit > 0 && plan.memory.host_bytes > limit && buffers > least) {
    buffers = std::max(least, buffers / 2);
    plan = place(memory, memory.model.parameters, machine, options, use, buffers);
  }
  const uint32_t stay = plan.placement.in_memory;
  const uint64_t slots =
      plan::slot_elements(std::span(memory.units).subspan(stay), plan.placement.host_slots);
  memory_budget = buffers + plan.gradient_memory_bytes +
                  memory.value_bytes * (plan::elements_of(memory.units, stay) + slots);
  return plan;
}

}  // namespace

std::string use_name(const TrainingUse& use) {
  if (use.program == plan::TrainingProgram::kTrain) return "smartinf train";
  if (use.streamed) return "Python, streamed";
  std::string name = use.release_gradients ? "Python, release_gradients=True" : "Python";
  if (use.gradient_budget != ~uint64_t{0}) {
    name += fmt::format(", gradient_budget=\"{}MB\"", use.gradient_budget / 1'000'000);
  }
  return name;
}

MemoryNeed memory_need(const ModelShape& model, const Machine& machine, const StepOptions& options,
                       const TrainingUse& use, const plan::Pipeline& pipeline) {
  // Python with torch and transformers beside what the machine file says of a program with torch.
  constexpr uint64_t kTransformersBytes = 330'000'000;
  // Assumed: CUDA's libraries as a process has them in the host's memory.
  constexpr uint64_t kCudaHostBytes = 1'500'000'000;
  const uint64_t parameters = model.parameters();
  const bool python = use.program == plan::TrainingProgram::kPython;
  const bool compressed_here = host_selects(machine, options);
  plan::TrainingMemoryInput input;
  input.model = model.training_model(use.program);
  input.program = use.program;
  input.gpu = machine.gpu.name != "none";
  input.value_bytes = options.value_bytes;
  input.measures_drives = machine.software.in_flight_bytes == 0 && !use.in_memory;
  input.recompute = use.recompute;
  input.accumulation = options.accumulation;
  input.ranks = options.ranks;
  input.release_gradients = use.release_gradients;
  // Master, momentum and variance, and all gradients once more, in f32.
  if (use.in_memory) input.optimizer_bytes = 16 * parameters;
  input.process_bytes =
      machine.host.process_bytes != 0 ? machine.host.process_bytes : plan::kTorchBytes;
  if (python || input.gpu) input.process_bytes += plan::kTorchGpuBytes;
  if (python) input.process_bytes += kTransformersBytes;
  if (input.gpu) input.process_bytes += kCudaHostBytes;
  MemoryNeed need;
  input.units = python ? python_units(model) : model.units();
  const std::vector<plan::Unit> all_units = input.units;
  const uint64_t tied = input.model.tied ? input.model.vocabulary * input.model.width : 0;
  if (pipeline.on()) plan::take_stage(pipeline, input);
  need.of_stage = pipeline.on();
  need.units = input.units;
  input.gradient_copies_elements = plan::gradient_copies_elements(input.model, input.units);
  need.plan = use.streamed
                  ? place_streamed(input, machine, options, use, need.memory_budget)
                  : place(input, parameters, machine, options, use, plan::kMemoryBudgetBytes,
                          pipeline, [&](uint64_t subgroup_elements) {
                            return plan::stage_state(pipeline, all_units, tied, subgroup_elements);
                          });
  const plan::TrainingMemory& memory = need.plan.memory;
  // Processes of several ranks each have a flat buffer of all weights; they share the rest.
  const uint64_t more_ranks = python ? machine.gpu.count - 1 : 0;
  const uint64_t of_more = more_ranks * (input.value_bytes * parameters + input.process_bytes);
  need.gpu_bytes = memory.accelerator_bytes;
  need.gpu_parts = memory.accelerator;
  need.host_bytes = memory.host_bytes + of_more;
  need.host_parts = memory.host;
  if (more_ranks > 0) need.host_parts.push_back({"the other ranks", of_more});

  const bool stays = pipeline.on() && pipeline.stages.chunks == 1;
  const uint64_t of_stage = pipeline.on() ? input.model.parameters : 0;
  const uint64_t gradients = compressed_here || use.in_memory || stays
                                 ? 0
                                 : all_gradient_bytes(parameters, of_stage, machine, options);
  const bool spilled = need.gradients_spilled = need.plan.gradient_memory_bytes < gradients;
  const double state = state_bytes_per_parameter(options.rule, options.format);
  double kept = 2 * (state + (compressed_here ? kResidualBytes : 0));
  if (spilled) kept += static_cast<double>(gradient_bytes_of(machine, options));
  const uint64_t of_drive =
      pipeline.on() ? base::divide_up(input.model.parameters,
                                      pipeline.stages.replicas * devices_of_one(machine, options))
                    : share_of(parameters, machine, options);
  need.drive_bytes = static_cast<uint64_t>(kept * static_cast<double>(of_drive)) +
                     base::divide_up(need.plan.spool_bytes,
                                     std::max<uint64_t>(1, devices_of_one(machine, options)));
  return need;
}

StepOptions with_plan(StepOptions options, const MemoryNeed& need) {
  options.gradient_memory_bytes =
      need.gradients_spilled ? need.plan.gradient_memory_bytes : ~uint64_t{0};
  if (!need.plan.streams) {
    options.weights = ResidentStep{};
    return options;
  }
  StreamedStep& streamed = options.weights.emplace<StreamedStep>();
  streamed.units = need.units;
  streamed.placement = need.plan.placement;
  streamed.inputs_spooled = need.plan.inputs_spooled;
  streamed.inputs_near = need.plan.inputs_spooled == 0;
  streamed.input_bytes = need.plan.input_bytes;
  return options;
}

uint64_t host_limit_bytes(const Machine& machine, const StepOptions& options) {
  return machine.host.memory_bytes / (options.ranks / options.machines);
}

std::string shortfall_of(const MemoryNeed& need, const Machine& machine, const StepOptions& options,
                         const TrainingUse& use) {
  std::string text;
  const auto lacks = [&](const std::string& where, uint64_t needed, uint64_t have) {
    if (have == 0 || needed <= have) return;
    text += fmt::format("{}{} lacks {}", text.empty() ? "" : "; ", where,
                        base::format_bytes(needed - have));
  };
  if (machine.gpu.name != "none") lacks("GPU memory", need.gpu_bytes, machine.gpu.memory_bytes);
  lacks("host memory", need.host_bytes, host_limit_bytes(machine, options));
  for (const DeviceGroup& device : machine.devices) {
    lacks(device.name, need.drive_bytes, device.capacity_bytes);
  }
  if (use.streamed && !can_stream(machine, options, use).ok()) {
    return fmt::format("{}, which a streamed model does not do",
                       can_stream(machine, options, use).what());
  }
  if (use.streamed && machine.gpu.count > 1) return "one process trains a streamed model";
  if (!text.empty() || use.program != plan::TrainingProgram::kTrain || machine.gpu.name == "none") {
    return text;
  }
  const uint32_t ranks = options.ranks / options.machines;
  if (machine.gpu.count > ranks) {
    return ranks == 1 ? "smartinf train computes on one GPU, and on several with as many ranks"
                      : "smartinf train computes on one GPU for each rank";
  }
  if (machine.gpu.count < ranks) return "there is not a GPU for each rank";
  if (options.ranks > 1 && need.plan.streams && !need.of_stage) {
    return "several ranks do not stream weights to accelerators";
  }
  return text;
}

}  // namespace smartinf::sim
