#include "smartinf/train/memory_plan.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/engine/memory.h"
#include "smartinf/model/config_counts.h"
#include "smartinf/plan/slots.h"
#include "smartinf/plan/stage_plan.h"
#include "smartinf/train/frozen_weights.h"

namespace smartinf::train {

namespace {

base::Status can_stream(const Options& options, const engine::UpdaterOptions& updater) {
  const auto cannot = [](const char* why, const char* advice) {
    return base::Status(base::ErrorCode::kUnsupported, why, advice);
  };
  if (options.train.where == OptimizerWhere::kMemory) {
    return cannot("optimizer.where is \"memory\", where nothing is stored on devices",
                  "Set optimizer.where = \"device\"");
  }
  if (updater.compress.on()) {
    return cannot("compressed gradients are collected in the host's memory, with their residual",
                  "Leave out compress.density");
  }
  return base::Status();
}

}  // namespace

plan::TrainingModel training_model(const model::Architecture& model, const Options& options,
                                   const plan::ParameterSpace& space) {
  plan::TrainingModel shape =
      model::training_model(model, uint64_t{options.train.micro_batch} * options.data.sequence);
  if (!options.lora.on()) return shape;
  shape.adapters = space.count();
  shape.largest_parameter = 0;
  for (const plan::ParameterRange& range : space.ranges()) {
    shape.largest_parameter = std::max(shape.largest_parameter, range.count);
  }
  return shape;
}

MemoryLimits memory_limits(const MemoryOptions& options, const AcceleratorMemory& accelerator,
                           uint32_t local_world) {
  MemoryLimits limits;
  limits.resident_bytes = engine::resident_memory_bytes();
  limits.host_bytes = options.host_bytes != 0
                          ? options.host_bytes
                          : limits.resident_bytes + engine::available_memory_bytes() / local_world;
  limits.accelerator = accelerator;
  limits.accelerator_bytes =
      options.accelerator_bytes != 0 ? options.accelerator_bytes : accelerator.free_bytes;
  return limits;
}

namespace {

/// Buffers of the devices and the engine.
struct Buffers {
  uint64_t subgroup_elements = 0;
  uint64_t bytes = 0;
};

constexpr uint64_t kRowHeadBytes = 24;  // of each gradient of a row that goes to another rank

/// Memory of an embedding that is a table: for where its rows are, and a step's gradients, at first
/// of each token and then of each row, in f32 and as they are sent. share: what a rank has of it.
/// Those of tokens it then has twice, and twice what comes for its devices.
template <typename Share>
uint64_t table_bytes(const model::Architecture& model, const Options& options,
                     const engine::UpdaterOptions& updater, uint32_t world, const Share& share) {
  const uint64_t tokens =
      uint64_t{options.train.accumulation} * options.train.micro_batch * options.data.sequence;
  const uint64_t value_bytes = base::data_type_bytes(precision_data_type(options.train.precision));
  const uint64_t of_row =
      model.width * (sizeof(float) + base::data_type_bytes(updater.gradient_type)) + 32;
  const uint64_t of_token = model.width * value_bytes;
  const uint64_t bytes = updater.table_memory_bytes + tokens * (of_token + sizeof(int64_t)) +
                         std::min<uint64_t>(tokens, model.vocabulary) * of_row;
  if (world == 1) return bytes;
  const uint64_t sent = 2 * tokens * (of_token + kRowHeadBytes);
  return share(bytes + sent) + base::divide_up(tokens, world) * of_token + sent / world;
}

/// The part of the rank with the most devices of a stage, of bytes that are for all of these.
uint64_t share_of_stage(const engine::UpdaterOptions& updater, const plan::Pipeline& pipeline,
                        uint64_t bytes) {
  std::map<uint32_t, uint64_t> devices;  // by rank
  for (const engine::DeviceOptions& device : updater.devices) {
    if (pipeline.stages.of_rank(device.rank) == pipeline.stage()) ++devices[device.rank];
  }
  uint64_t all = 0, most = 0;
  for (const auto& [rank, count] : devices) {
    all += count;
    most = std::max(most, count);
  }
  return all == 0 ? bytes : plan::share_of_devices(bytes, most, all);
}

}  // namespace

plan::DeviceSharing device_sharing(const engine::UpdaterOptions& updater, uint32_t world) {
  std::vector<uint32_t> ranks;
  for (const engine::DeviceOptions& device : updater.devices) ranks.push_back(device.rank);
  return plan::device_sharing(ranks, world);
}

base::Result<plan::TrainingPlan> plan_run(const model::Architecture& model, const Options& options,
                                          const engine::UpdaterOptions& updater,
                                          const plan::ParameterSpace& space,
                                          const MemoryLimits& limits, uint32_t world,
                                          const plan::Pipeline& pipeline) {
  const AcceleratorMemory& accelerator = limits.accelerator;
  plan::TrainingPlanInput input;
  plan::TrainingMemoryInput& memory = input.memory;
  memory.model = training_model(model, options, space);
  memory.gpu = accelerator.free_bytes > 0;
  memory.gpu_library_bytes = accelerator.taken_bytes;
  memory.value_bytes =
      static_cast<uint32_t>(base::data_type_bytes(precision_data_type(options.train.precision)));
  memory.accumulation = options.train.accumulation;
  memory.ranks = world;
  memory.sums_by_tree = options.ranks.order == SumOrder::kFixed;
  memory.units = model::make_units(model);
  if (pipeline.on()) plan::take_stage(pipeline, memory);
  memory.gradient_copies_elements = plan::gradient_copies_elements(memory.model, memory.units);
  const uint64_t beside =
      accelerator.unified  // what it takes of the host's memory
          ? accelerator.taken_bytes + memory.value_bytes * memory.gradient_copies_elements
          : 0;
  memory.process_bytes = limits.resident_bytes + plan::kLoadedLaterBytes + beside;
  std::optional<uint64_t> of_stage;  // gradients, where its state is its own
  if (options.train.where == OptimizerWhere::kMemory) {
    memory.optimizer_bytes = 16 * space.count();
    memory.measures_drives = false;
  } else {
    const auto devices = static_cast<uint32_t>(std::max<size_t>(1, updater.devices.size()));
    const plan::DeviceSharing sharing = device_sharing(updater, world);
    const auto share = [&](uint64_t bytes) {
      return world == 1 ? bytes : plan::share_of_devices(bytes, sharing.most, devices);
    };
    const uint64_t gradient_bytes = base::data_type_bytes(updater.gradient_type);
    input.gradient_bytes = share(space.count() * gradient_bytes);
    const std::optional<uint64_t> in_flight = engine::known_in_flight_bytes(updater);
    const auto buffers_of = [&](bool streams, bool spills) -> base::Result<Buffers> {
      engine::UpdaterOptions asked = updater;
      if (world > 1) asked.compress = {};  // devices get dense sums
      asked.stream_weights = streams && !updater.compress.on() && !options.lora.on();
      if (spills) asked.gradient_budget_bytes = 0;
      SI_ASSIGN_OR_RETURN(const plan::MemoryPlan planned,
                          engine::plan_buffers(asked, space, devices));
      plan::DriveSlots drives;
      if (in_flight && engine::gradient_spill_bytes(asked, space) == 0) {
        drives.in_flight_bytes = *in_flight;
      }
      const uint64_t bytes = plan::buffer_bytes(planned, space.count(), devices, drives);
      return Buffers{planned.subgroup_elements,
                     planned.staging_bytes + share(bytes - planned.staging_bytes)};
    };
    SI_ASSIGN_OR_RETURN(const Buffers usual, buffers_of(false, false));
    SI_ASSIGN_OR_RETURN(const Buffers streaming, buffers_of(true, false));
    SI_ASSIGN_OR_RETURN(const Buffers buffers, buffers_of(true, true));
    const auto more = [&](uint64_t bytes) { return bytes - std::min(bytes, usual.bytes); };
    input.stream_bytes = more(streaming.bytes);
    input.spill_bytes = more(buffers.bytes);
    memory.optimizer_bytes = usual.bytes + share(updater.state_cache_bytes);
    if (model.table_embedding) {
      memory.optimizer_bytes += table_bytes(model, options, updater, world, share);
    }
    if (world > 1) {
      plan::RankExchange exchange{.elements = space.count(),
                                  .ranks = world,
                                  .subgroup_elements = buffers.subgroup_elements};
      if (pipeline.on() && options.lora.on()) exchange.ranks = 0;
      if (pipeline.on() && !options.lora.on()) {
        const plan::StageState state =
            plan::stage_state(pipeline, model::make_units(model),
                              model.tied_head ? uint64_t{model.vocabulary} * model.width : 0,
                              buffers.subgroup_elements, limits.held);
        exchange = state.exchange;
        memory.optimizer_bytes += memory.value_bytes * state.of_others;
        if (state.is_own && pipeline.stages.chunks == 1) {
          of_stage = share_of_stage(updater, pipeline, state.elements * gradient_bytes);
        }
      }
      exchange.value_bytes = memory.value_bytes;
      memory.optimizer_bytes += plan::rank_bytes(space.count(), exchange);
    }
    memory.measures_drives = !in_flight || (devices > 1 && !engine::rates_are_known(updater));
    memory.slot_padding_bytes =
        memory.value_bytes *
        (pipeline.on() ? 2 * buffers.subgroup_elements
                       : plan::slot_padding_elements(memory.units, buffers.subgroup_elements));
    if (options.lora.on())
      memory.slot_padding_bytes = 2 * kFrozenPieceElements * memory.value_bytes;
    input.gradient_limit_bytes = share(updater.gradient_budget_bytes);
    input.spools = sharing.all_have_one;
    if (!input.spools && options.memory.activations == plan::Activations::kOffload) {
      return base::Status(base::ErrorCode::kInvalidArgument,
                          "memory.activations is \"offload\", but not every rank has a device for "
                          "its activations",
                          "Name a device for each rank, or set it to \"recompute\"");
    }
    if (updater.compress.on()) {  // the step's gradient and the residual, in the host's memory
      const bool has_stage = pipeline.on() && !options.lora.on();
      memory.optimizer_bytes += 4 * (has_stage ? memory.model.parameters : space.count());
      if (world == 1) input.gradient_bytes = 0;
    }
  }
  input.activations = options.memory.activations;
  input.streams = can_stream(options, updater);
  if (pipeline.on()) {
    const uint64_t trained = options.lora.on() ? memory.model.adapters : memory.model.parameters;
    input.gradient_bytes = of_stage.value_or(std::max<uint64_t>(
        input.gradient_bytes, base::data_type_bytes(updater.gradient_type) * trained));
    input.spools = false;
    // Subgroups in which a chunk meets those of other stages.
    memory.optimizer_bytes += (pipeline.stages.chunks - 1) * memory.slot_padding_bytes;
    if (pipeline.stages.chunks == 1) {
      input.streams =
          base::Status(base::ErrorCode::kUnsupported,
                       "a stage of one chunk keeps its weights in memory (of more stages each has "
                       "less)");
    }
  }
  input.host_limit_bytes = limits.host_bytes;
  if (memory.gpu) input.accelerator_limit_bytes = limits.accelerator_bytes;
  return plan::plan_training(input);
}

std::vector<std::string> describe_plan(const plan::TrainingPlan& plan) {
  std::vector<std::string> lines;
  const auto describe = [&](const char* where, const std::vector<plan::MemoryPart>& parts,
                            uint64_t bytes) {
    lines.push_back(fmt::format("memory: {} of {} memory are planned: {}",
                                base::format_bytes(bytes), where, plan::describe_parts(parts)));
  };
  if (!plan.memory.accelerator.empty()) {
    describe("the accelerator's", plan.memory.accelerator, plan.memory.accelerator_bytes);
  }
  describe("the host's", plan.memory.host, plan.memory.host_bytes);
  if (!plan.streams) return lines;
  std::string where =
      fmt::format("{} of {} units stay in memory", plan.placement.in_memory, plan.units);
  if (!plan.memory.accelerator.empty()) {
    where = fmt::format("{} of {} units stay on the accelerator, {} more in the host's memory",
                        plan.placement.on_accelerator, plan.units,
                        plan.placement.in_memory - plan.placement.on_accelerator);
  }
  const bool all_stay = plan.placement.in_memory == plan.units;
  lines.push_back(
      fmt::format("weights: {}{}", where, all_stay ? "" : ", the others come from the devices"));
  const auto and_on_devices = [](uint64_t count) {
    return count == 0 ? "" : fmt::format(" and {} on the devices", count);
  };
  lines.push_back(fmt::format("activations: {} inputs of {} in memory{}", plan.inputs_in_memory,
                              base::format_bytes(plan.input_bytes),
                              and_on_devices(plan.inputs_spooled)));
  if (plan.saved_bytes == 0) {
    lines.back() += "; backward computes the rest again";
    return lines;
  }
  const std::string rest =
      fmt::format("{} buffers of {}", plan.saved_in_memory, base::format_bytes(plan.saved_bytes));
  const std::string room = base::format_bytes(plan.saved_spool_bytes);
  lines.back() +=
      plan.measures_offload
          ? fmt::format(
                "; backward computes the rest again, but for what the first steps show to be "
                "faster in {} and {} on the devices",
                rest, room)
          : fmt::format("; the rest in {}, those beyond come from the devices, where they have {}",
                        rest, room);
  return lines;
}

}  // namespace smartinf::train
