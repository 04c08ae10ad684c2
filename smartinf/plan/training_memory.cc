#include "smartinf/plan/training_memory.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"
#include "smartinf/plan/slots.h"

namespace smartinf::plan {
namespace {

// What the CPU's products of 16 bit take of process_bytes: generated code and packed matrices.
constexpr uint64_t k16BitBytes = 15'000'000;
// Measuring the drives takes this for a while (storage/tuning.cc), before kLoadedLaterBytes.
constexpr uint64_t kTuningBytes = 256 * base::kMiB;

// Memory beside weights and optimizer in one phase of forward and backward.
struct Phase {
  uint64_t activations = 0;
  uint64_t gradients = 0;
  uint64_t logits = 0;
  uint64_t sums = 0;  // over micro batches, in f32
  uint64_t total() const { return activations + gradients + logits + sums; }
};

/// In backward: the logarithms of the chances, and gradients of them and of the logits, in f32.
uint64_t logits_bytes(const TrainingMemoryInput& input) {
  const TrainingModel& model = input.model;
  const bool in_parts = input.program == TrainingProgram::kTrain;
  const uint64_t rows =
      in_parts ? std::min(model.tokens, head_rows(model.vocabulary)) : model.tokens;
  return rows * model.vocabulary * 3 * 4;
}

/// Parameters that have gradients.
uint64_t trained_of(const TrainingModel& model) {
  return model.adapters != 0 ? model.adapters : model.parameters;
}

/// Elements of the head's matrix, where it is trained.
uint64_t head_elements(const TrainingModel& model) {
  return model.adapters != 0 ? 0 : model.vocabulary * model.width;
}

/// Bytes of the input of a unit for a micro batch.
uint64_t input_bytes(const TrainingMemoryInput& input) {
  return input.value_bytes * input.model.tokens * input.model.width;
}

/// Gradients between a layer's feed-forward products. In the trainer most take the place of saved
/// values that they were made from; in the Python package what was measured has room for all.
uint64_t feed_forward_bytes(const TrainingMemoryInput& input) {
  const TrainingModel& model = input.model;
  const bool ours = input.program == TrainingProgram::kTrain;
  const uint64_t widths = ours ? 2 : model.gated ? 6 : 4;
  return model.tokens * input.value_bytes * widths * model.mlp_width;
}

/// A norm: its input in f32, one factor, what is normalized (in f32 in our trainer, in the model's
/// own type in transformers), and the product with its weight.
uint64_t norm_bytes(const TrainingModel& model, TrainingProgram program, uint32_t value_bytes) {
  const uint64_t normalized = program == TrainingProgram::kTrain ? 4 : value_bytes;
  return model.tokens * (model.width * (4 + normalized + value_bytes) + 4);
}

/// The trainer's head before its first product: its input and the norm.
uint64_t head_input_bytes(const TrainingMemoryInput& input) {
  return input_bytes(input) + norm_bytes(input.model, input.program, input.value_bytes);
}

/// The trainer's gradient of the head's matrix while logits are made part by part: the first part's
/// has the weights' type, the sum of more is f32.
uint64_t head_gradient_bytes(const TrainingMemoryInput& input, bool of_all) {
  const TrainingModel& model = input.model;
  const uint64_t parts = base::divide_up(model.tokens, head_rows(model.vocabulary));
  const uint64_t each = parts > (of_all ? 1 : 2) ? sizeof(float) : input.value_bytes;
  return of_all || parts > 1 ? each * head_elements(model) : 0;
}

/// Micro batches that one process computes in a step, at most.
uint64_t batches_of(const TrainingMemoryInput& input) {
  return base::divide_up(input.accumulation, input.ranks);
}

/// Sums for each parameter: sums over micro batches in f32 that there are at once, beside what is
/// added. Most of them are at hand before the tree's last right leaf; a rank's share of the tree
/// that is not one node may have such nodes on both sides.
uint64_t sums_of(const TrainingMemoryInput& input) {
  const auto batches = batches_of(input);
  if (batches == 1) return 0;
  if (input.program == TrainingProgram::kPython) return 1;
  if (input.ranks == 1 && !input.sums_by_tree) return 1;
  const auto levels = static_cast<uint64_t>(std::bit_width(batches)) - 1;
  const bool one_node = std::has_single_bit(batches) && input.accumulation % input.ranks == 0;
  return input.ranks == 1 || one_node ? levels : std::min(batches - 1, 2 * levels);
}

uint64_t inputs_of(const TrainingMemoryInput& input) {
  return (input.units.size() - 1) * batches_of(input);
}

/// Elements of the `count` largest.
uint64_t largest_of(std::span<const Unit> units, size_t count = 1) {
  std::vector<uint64_t> elements;
  for (const Unit& unit : units) elements.push_back(unit.count);
  std::ranges::sort(elements, std::greater());
  elements.resize(std::min(count, elements.size()));
  return std::accumulate(elements.begin(), elements.end(), uint64_t{0});
}

std::vector<Unit> layers_of(std::span<const Unit> units) {
  std::vector<Unit> layers;
  std::ranges::copy_if(units, std::back_inserter(layers),
                       [](const Unit& unit) { return unit.layers > 0; });
  return layers;
}

uint32_t most_layers_of(std::span<const Unit> units) {
  uint32_t layers = 0;
  for (const Unit& unit : units) layers = std::max(layers, unit.layers);
  return layers;
}

Phase largest(std::initializer_list<Phase> phases) {
  return std::max(phases, [](const Phase& a, const Phase& b) { return a.total() < b.total(); });
}

/// Where each unit does all micro batches before the next one: gradients of one unit at a time.
Phase peak_of_stream(const TrainingMemoryInput& input) {
  const TrainingModel& model = input.model;
  const uint64_t saved = layer_saved_bytes(model, input.program, input.value_bytes);
  const uint64_t boundary = batches_of(input) * input_bytes(input);  // gradients between units
  // Beside a GPU those that are not all there are in the host's memory, but for one unit's.
  const bool near = !input.gpu || input.inputs_in_memory == inputs_of(input);
  const uint64_t inputs = near ? input.inputs_in_memory : batches_of(input) + 1;
  // Beside a GPU one is computed with while the next one comes, and what is computed again needs
  // its own.
  const uint64_t near_buffers = input.gpu ? (input.saves_all ? 1 : 2) : input.saved_in_memory;
  const uint64_t in_buffers = near_buffers * input.saved_bytes;
  const uint64_t kept = (inputs + input.messages) * input_bytes(input) + boundary + in_buffers;
  const uint64_t layers = most_layers_of(input.units);
  uint64_t elements = largest_of(layers_of(input.units));
  if (input.chunk_units > 0) elements = largest_of(input.units, input.chunk_units);
  if (model.adapters != 0) {
    elements =
        base::divide_up(model.adapters * layers * std::max(1u, input.chunk_units), model.layers);
  }
  // Sums over micro batches in f32, and what is added to them.
  const uint64_t each = input.value_bytes + 4 * sums_of(input);
  const uint64_t head = head_elements(model);
  const uint64_t whole = sums_of(input) > 0 ? 4 : input.value_bytes;  // of all micro batches
  const uint64_t tied = model.tied ? head * (input.ranks == 1 ? whole : each) : 0;
  const bool parts =
      input.program == TrainingProgram::kTrain && model.tokens > head_rows(model.vocabulary);
  const uint64_t of_head = input.program == TrainingProgram::kTrain && model.vocabulary > 0
                               ? head_input_bytes(input)
                               : 0;
  const Phase loss{kept + of_head, head * (parts ? each + 4 : each), logits_bytes(input)};
  // A unit's last product comes first in backward, when all that was saved is still there, and its
  // gradient is the only one; at the end all gradients are there.
  const uint64_t sums = elements * (each - input.value_bytes);
  const uint64_t first = std::min(elements, model.width * model.mlp_width);
  const Phase layer{kept + layers * saved + feed_forward_bytes(input),
                    tied + sums + first * input.value_bytes, 0};
  const Phase gradients{kept + saved, tied + elements * each, 0};
  const Phase embedding{kept, tied + head * each, 0};
  return largest({loss, layer, gradients, embedding});
}

/// The trainer, where all units stay, at one moment of a step: a micro batch goes through the units
/// one after another, and each unit's gradients leave before the next one's are made.
Phase peak_of_backward(const TrainingMemoryInput& input, const BackwardMoment& moment) {
  const TrainingModel& model = input.model;
  const uint64_t value_bytes = input.value_bytes;
  const uint64_t of_input = input_bytes(input);
  const uint64_t unit_layers = std::max(1u, input.unit_layers);
  const uint64_t units = base::divide_up(model.layers, unit_layers);  // a stage may have none
  const uint64_t of_unit =
      units == 0 ? 0 : unit_layers * layer_saved_bytes(model, input.program, input.value_bytes);
  // In f32 the first norm keeps the unit's input itself.
  const uint64_t in_unit = units > 0 && value_bytes == sizeof(float) && model.gated ? of_input : 0;
  const uint64_t of_batch =
      input.recompute ? units * of_input : units * (of_unit + of_input - in_unit);
  const uint64_t others = (moment.in_flight - 1) * of_batch + input.messages * of_input;
  const uint64_t kept = of_batch + others;
  // Sums over micro batches, a tied head's among them.
  const bool sums = sums_of(input) > 0;
  const uint64_t of_matrix = head_elements(model);
  const uint64_t head_sums = 4 * sums_of(input) * of_matrix;
  const uint64_t all_sums = 4 * sums_of(input) * (trained_of(model) + (model.tied ? of_matrix : 0));
  const uint64_t layer_sums = all_sums - head_sums;
  const uint64_t before = moment.layers_summed ? layer_sums : 0;
  const uint64_t head = head_gradient_bytes(input, /*of_all=*/true);
  const uint64_t tied = model.tied && !sums ? head : 0;
  // A stage gives its gradients when it has sent its last message.
  const uint64_t all = input.messages > 0 && !sums ? value_bytes * trained_of(model) : 0;
  const bool frozen = model.adapters != 0;
  const uint64_t trained =
      value_bytes * (frozen ? base::divide_up(model.adapters, std::max<uint64_t>(1, units))
                            : input.unit_elements);
  const uint64_t of_embedding = frozen ? 0 : value_bytes * input.embedding_elements;

  const uint64_t of_head = model.vocabulary == 0 ? 0 : head_input_bytes(input) + of_input;
  const uint64_t in_head = before + (moment.head_summed ? head_sums : 0);
  const Phase loss{kept + of_head, head_gradient_bytes(input, /*of_all=*/false),
                   logits_bytes(input), in_head};
  // The gradients of a norm that lie between its input's and its result's, in f32.
  const uint64_t of_norm = model.vocabulary == 0 ? 0 : 4 * model.tokens * model.width * 4;
  const Phase norm{kept + of_head + of_norm, head, 0, in_head};
  // The last unit, whose values are computed once more where they were not kept: its first product
  // in backward...
  const uint64_t again = input.recompute ? of_unit - in_unit : 0;
  const auto in_layers = [&](uint64_t there, uint64_t summed) {
    const Phase last{there + again + of_input + feed_forward_bytes(input),
                     tied + std::min(trained, value_bytes * model.width * model.mlp_width), 0,
                     summed};
    // ...and all its gradients.
    const Phase unit{there + again - of_unit + in_unit + 2 * of_input +
                         norm_bytes(model, input.program, input.value_bytes),
                     tied + trained, 0, summed};
    return largest({last, unit});
  };
  // Then those of the first units, of which a tied embedding's are added and cast.
  const Phase first{others + of_input, tied + std::max(all, of_embedding + tied / 2), 0, all_sums};
  Phase peak;
  if (moment.head) peak = largest({loss, norm});
  if (!moment.layers) return peak;
  peak = largest({peak, in_layers(kept, before + head_sums), first});
  if (moment.layers_summed || units == 0) return peak;
  // The first micro batch's sums are made while its activations go: the first unit comes last.
  return largest({peak, in_layers(others + of_batch / units, all_sums)});
}

Phase peak_of_backward(const TrainingMemoryInput& input) {
  if (input.moments.empty()) return peak_of_backward(input, {});
  Phase peak;
  for (const BackwardMoment& moment : input.moments) {
    peak = largest({peak, peak_of_backward(input, moment)});
  }
  return peak;
}

/// Likewise a model of transformers, whose gradients stay until its step.
Phase peak_of_python(const TrainingMemoryInput& input) {
  const TrainingModel& model = input.model;
  const uint64_t value_bytes = input.value_bytes;
  const uint64_t saved = layer_saved_bytes(model, input.program, input.value_bytes);
  const uint64_t backward = feed_forward_bytes(input);
  const uint64_t kept = model.layers * (input.recompute ? input_bytes(input) : saved);
  const uint64_t all = value_bytes * trained_of(model);
  const uint64_t one = value_bytes * model.largest_parameter;
  const uint64_t head = value_bytes * head_elements(model);
  // The sums of earlier micro batches are the gradients themselves, which stay where they are; each
  // new one is added and freed.
  const bool sums_are_gradients = input.accumulation > 1 && !input.release_gradients;
  const uint64_t before = sums_are_gradients ? all : 0;

  // Backward begins; what the logarithms were made of is gone.
  const Phase loss{kept, before, logits_bytes(input)};
  // Then the last layer's, with its values computed once more where they were not kept, and the
  // head's gradient; ...
  const uint64_t again = input.recompute ? saved : 0;
  const Phase last{kept + again + backward, before + head, 0};
  // ...and the first layer's, with the gradients of all others. Of released ones the largest is
  // left; a tied head's waits for the embedding's, and both are there when they are added.
  Phase first{saved + backward, all, 0};
  if (input.release_gradients) first.gradients = model.tied ? 2 * one : one;
  if (sums_are_gradients) first.gradients = all + one;
  return largest({loss, last, first});
}

}  // namespace

uint64_t head_rows(uint64_t vocabulary) {
  constexpr uint64_t kLogits = uint64_t{1} << 24;
  constexpr uint64_t kRowsMin = 16;
  return std::max(kRowsMin, kLogits / std::max<uint64_t>(1, vocabulary));
}

uint64_t layer_saved_bytes(const TrainingModel& model, TrainingProgram program,
                           uint32_t value_bytes) {
  const uint64_t query = model.query_width;
  const uint64_t kv = model.kv_width;
  // Korthikanti et al. 2022, section 4.1, without the scores, which no fused attention keeps.
  if (!model.gated) return model.tokens * 17 * value_bytes * model.width;
  const bool ours = program == TrainingProgram::kTrain;
  // Rotated query and key, value, result. Our trainer has query, key and value in one tensor, kept
  // by the value's view.
  const uint64_t attention =
      value_bytes * ((ours ? query + 2 * kv : kv) + query + kv + query) + 4 * model.heads;
  // Gate and up, what SiLU makes of the gate, the product of both.
  const uint64_t forward = value_bytes * 4 * model.mlp_width;
  return 2 * norm_bytes(model, program, value_bytes) + model.tokens * (attention + forward);
}

uint64_t gradient_copies_elements(const TrainingModel& model, std::span<const Unit> units) {
  const uint64_t of_unit =
      model.adapters == 0 ? largest_of(units)
                          : base::divide_up(model.adapters * most_layers_of(units), model.layers);
  return std::max(model.largest_parameter, of_unit);
}

uint64_t total_bytes(std::span<const MemoryPart> parts) {
  uint64_t bytes = 0;
  for (const MemoryPart& part : parts) bytes += part.bytes;
  return bytes;
}

std::string describe_parts(std::span<const MemoryPart> parts) {
  std::string text;
  for (const MemoryPart& part : parts) {
    if (part.bytes == 0) continue;
    text +=
        std::string(text.empty() ? "" : ", ") + part.name + " " + base::format_bytes(part.bytes);
  }
  return text;
}

TrainingMemory training_memory(const TrainingMemoryInput& input) {
  const TrainingModel& model = input.model;
  const bool python = input.program == TrainingProgram::kPython;
  const bool stay = input.units.empty();
  const uint64_t value_bytes = input.value_bytes;
  const uint64_t weights = value_bytes * model.parameters;
  const uint64_t largest = value_bytes * model.largest_parameter;
  const std::span<const Unit> units(input.units);
  const UnitPlacement& placement = input.placement;
  const bool all_in_memory = placement.in_memory == units.size();
  const uint64_t host_slots =
      stay || all_in_memory
          ? 0
          : value_bytes * slot_elements(units.subspan(placement.in_memory), placement.host_slots) +
                placement.host_slots * input.slot_padding_bytes;
  const uint64_t in_host = stay ? weights : value_bytes * elements_of(units, placement.in_memory);
  const Phase phase = !stay    ? peak_of_stream(input)
                      : python ? peak_of_python(input)
                               : peak_of_backward(input);
  std::vector<MemoryPart> computing{{"weights", in_host},
                                    {"gradients", phase.gradients},
                                    {"activations", phase.activations},
                                    {"logits and their gradients", phase.logits}};
  computing.push_back({"sums of gradients in f32", phase.sums});
  const uint64_t adapters = value_bytes * model.adapters;
  computing.push_back({"adapters", adapters});
  TrainingMemory memory;
  if (input.gpu) {
    if (!stay) {
      const uint32_t there = placement.on_accelerator;
      computing[0].bytes = value_bytes * elements_of(units, there);
      const uint64_t in_slots = slot_elements(units.subspan(there), placement.accelerator_slots);
      computing.push_back({"slots of units", value_bytes * in_slots});
    }
    memory.accelerator = std::move(computing);
    memory.accelerator.push_back({"CUDA itself (assumed)", input.gpu_library_bytes});
    // New weights arrive in a flat buffer; gradients leave one by one.
    memory.host.push_back({"weights", in_host});
    memory.host.push_back({"adapters", adapters});
    const uint64_t copies = std::max(largest, value_bytes * input.gradient_copies_elements);
    memory.host.push_back({"gradients on their way", python            ? largest
                                                     : input.ranks > 1 ? 2 * largest
                                                                       : copies});
    if (!stay && input.inputs_in_memory < inputs_of(input)) {
      memory.host.push_back({"inputs of units", input.inputs_in_memory * input_bytes(input)});
    }
    if (input.saved_in_memory > 0) {
      memory.host.push_back({"saved tensors", input.saved_in_memory * input.saved_bytes});
    }
  } else {
    memory.host = std::move(computing);
    if (!stay) memory.host.push_back({"a gradient on its way", largest});
  }
  if (host_slots > 0) memory.host.push_back({"slots of units from the devices", host_slots});
  memory.host.push_back({"optimizer: buffers and gradients", input.optimizer_bytes});
  if (python && input.release_gradients && input.accumulation > 1) {
    memory.host.push_back({"sums of released gradients in f32", 4 * model.parameters});
  }
  const bool products_of_16_bit = python || input.gpu || value_bytes < sizeof(float);
  memory.host.push_back(
      {"the process itself",
       input.process_bytes -
           (products_of_16_bit ? 0 : std::min(input.process_bytes, k16BitBytes))});
  memory.host_bytes = total_bytes(memory.host);
  const uint64_t at_start =
      input.measures_drives ? input.process_bytes + kTuningBytes - kLoadedLaterBytes : 0;
  if (at_start > memory.host_bytes) {
    memory.host.push_back({"more while the drives are measured", at_start - memory.host_bytes});
    memory.host_bytes = at_start;
  }
  memory.accelerator_bytes = total_bytes(memory.accelerator);
  return memory;
}

bool fits(const TrainingMemory& memory, const TrainingPlanInput& input) {
  return memory.host_bytes <= input.host_limit_bytes &&
         memory.accelerator_bytes <= input.accelerator_limit_bytes;
}

namespace {

/// Slots with one unit held (with a tied head two), one that is being read, and one more, so that
/// reading does not wait for the unit that is in use. On an accelerator two do at least.
constexpr uint32_t kHostSlots = 3;
constexpr uint32_t kAcceleratorSlotsMin = 2;
constexpr uint32_t kAcceleratorSlots = 3;
/// Unit inputs in memory at least, beside those of one unit: some on their way. So many buffers of
/// what autograd keeps.
constexpr uint64_t kOnTheirWay = 4;
/// Gradients in memory at least, beside the buffers through which the others are spilled.
constexpr uint64_t kGradientsMin = 16 * base::kMiB;

base::Status does_not_fit(const TrainingMemory& memory, const TrainingPlanInput& input) {
  const bool accelerator = memory.accelerator_bytes > input.accelerator_limit_bytes;
  const uint64_t limit = accelerator ? input.accelerator_limit_bytes : input.host_limit_bytes;
  const uint64_t needed = accelerator ? memory.accelerator_bytes : memory.host_bytes;
  return base::Status(
      base::ErrorCode::kOutOfMemory,
      std::string("training needs ") + base::format_bytes(needed) + " of " +
          (accelerator ? "the accelerator's" : "the host's") + " memory at least, and " +
          base::format_bytes(limit) +
          " may be used: " + describe_parts(accelerator ? memory.accelerator : memory.host),
      std::string("Allow more with ") + (accelerator ? "memory.accelerator" : "memory.host") +
          ", or make train.micro_batch, data.sequence" +
          (accelerator ? "" : ", engine.memory_budget") + " or the model smaller");
}

/// Everything stays where the model computes.
TrainingPlan stay_plan(const TrainingPlanInput& input, bool recompute) {
  TrainingPlan plan;
  TrainingMemoryInput memory = input.memory;
  memory.unit_layers = most_layers_of(memory.units);
  memory.unit_elements = largest_of(layers_of(memory.units));
  if (memory.units.front().layers == 0) memory.embedding_elements = memory.units.front().count;
  memory.units.clear();
  memory.recompute = plan.recompute = recompute;
  plan.gradient_memory_bytes = std::min(input.gradient_bytes, input.gradient_limit_bytes);
  memory.optimizer_bytes += plan.gradient_memory_bytes;
  const auto all = static_cast<uint32_t>(input.memory.units.size());
  plan.units = all;
  plan.placement = {all, all, 0, 0};
  plan.memory = training_memory(memory);
  if (memory.program == TrainingProgram::kTrain && memory.ranks == 1 && memory.messages == 0) {
    const uint64_t waiting =
        sums_of(memory) > 0 ? 0 : memory.value_bytes * trained_of(memory.model);
    const uint64_t of_host = memory.gpu ? 0 : waiting;
    plan.gradients_wait =
        plan.memory.host_bytes + of_host <= input.host_limit_bytes &&
        plan.memory.accelerator_bytes + (waiting - of_host) <= input.accelerator_limit_bytes;
  }
  return plan;
}

/// Whether as much of weights, gradients and inputs stays.
bool keeps_as_much(const TrainingPlan& plan, const TrainingPlan& all_stay, bool gpu) {
  return (!gpu || plan.placement.on_accelerator == all_stay.placement.on_accelerator) &&
         plan.placement.in_memory == all_stay.placement.in_memory &&
         plan.gradient_memory_bytes == all_stay.gradient_memory_bytes && plan.inputs_spooled == 0;
}

class StreamPlan {
 public:
  StreamPlan(const TrainingPlanInput& input, bool offloads) : input_(input), memory_(input.memory) {
    memory_.recompute = true;
    memory_.placement = {0, memory_.staying_units, kHostSlots, kAcceleratorSlotsMin};
    if (const uint32_t held = memory_.chunk_units; held > 0) {  // and those of the next chunk
      memory_.placement.host_slots = 2 * held + 1;
      memory_.placement.accelerator_slots = held + 2;
    }
    inputs_ = inputs_of(memory_);
    memory_.inputs_in_memory =
        input.spools ? std::min(inputs_, batches_of(memory_) + kOnTheirWay) : inputs_;
    if (offloads) {
      memory_.saves_all = input.activations == Activations::kOffload;
      const uint64_t of_layer =
          layer_saved_bytes(memory_.model, memory_.program, memory_.value_bytes) +
          kSavedTensors * kSavedAlignment;
      memory_.saved_bytes = most_layers_of(memory_.units) * of_layer;
      saved_ = (memory_.units.size() - 2) * batches_of(memory_);
      memory_.saved_in_memory = std::min(saved_, kOnTheirWay);
    }
    uint64_t gradients_min = kGradientsMin;
    if (memory_.program == TrainingProgram::kPython) {  // those of a whole unit
      gradients_min = std::max(gradients_min, memory_.value_bytes * largest_of(memory_.units));
    }
    const uint64_t most = std::min(input.gradient_bytes, input.gradient_limit_bytes);
    gradients_ = std::min(most, gradients_min);
    if (most == input.gradient_bytes &&
        most + input.stream_bytes <= gradients_ + input.spill_bytes) {
      gradients_ = most;
    }
  }

  TrainingMemory memory() const {
    TrainingMemoryInput memory = memory_;
    memory.optimizer_bytes +=
        gradients_ +
        (gradients_ < input_.gradient_bytes ? input_.spill_bytes : input_.stream_bytes);
    return training_memory(memory);
  }

  TrainingPlan make() {
    const bool measures = saved_ > 0 && !memory_.saves_all;
    grow_first(memory_.inputs_in_memory, inputs_);
    if (!measures) grow(memory_.saved_in_memory, saved_);
    grow_first(gradients_, std::min(input_.gradient_bytes, input_.gradient_limit_bytes));
    const auto units = static_cast<uint32_t>(memory_.units.size());
    grow(memory_.placement.in_memory, units);
    if (memory_.gpu && memory_.program == TrainingProgram::kTrain) {
      grow(memory_.placement.accelerator_slots,
           std::max(kAcceleratorSlots, 2 * memory_.chunk_units + 2));
      grow(memory_.placement.on_accelerator, memory_.placement.in_memory);
    }
    if (measures) grow(memory_.saved_in_memory, saved_);
    TrainingPlan plan;
    plan.units = units;
    plan.placement = memory_.placement;
    plan.recompute = true;
    plan.streams = true;
    plan.gradient_memory_bytes = gradients_;
    plan.inputs_in_memory = memory_.inputs_in_memory;
    plan.inputs_spooled = inputs_ - memory_.inputs_in_memory;
    plan.input_bytes = input_bytes(memory_);
    plan.saved_in_memory = memory_.saved_in_memory;
    plan.saved_bytes = memory_.saved_bytes;
    const auto room = [](uint64_t spooled, uint64_t bytes) {
      if (spooled == 0) return uint64_t{0};
      return (spooled + 2 * kOnTheirWay) * base::round_up(bytes, base::kIoAlignment);
    };
    plan.saved_spool_bytes = room(saved_, plan.saved_bytes);
    plan.spool_bytes = room(plan.inputs_spooled, plan.input_bytes) + plan.saved_spool_bytes;
    plan.measures_offload = measures;
    plan.memory = memory();
    return plan;
  }

 private:
  /// Where all need less than nearly all: inputs stay where the model computes, and without spilled
  /// gradients there are fewer buffers.
  void grow_first(uint64_t& value, uint64_t most) {
    const uint64_t least = std::exchange(value, most);
    if (fits(memory(), input_)) return;
    value = least;
    if (least < most) grow(value, most - 1);
  }

  /// The largest value up to `most` that fits.
  template <typename Value>
  void grow(Value& value, Value most) {
    Value fits_still = value;
    Value too_much = most + 1;
    while (too_much - fits_still > 1) {
      value = fits_still + (too_much - fits_still) / 2;
      (fits(memory(), input_) ? fits_still : too_much) = value;
    }
    value = fits_still;
  }

  const TrainingPlanInput& input_;
  TrainingMemoryInput memory_;
  uint64_t inputs_ = 0;
  uint64_t saved_ = 0;
  uint64_t gradients_ = 0;
};

}  // namespace

TrainingPlan without_offload(TrainingPlan plan) {
  plan.spool_bytes -= std::exchange(plan.saved_spool_bytes, 0);
  plan.saved_bytes = plan.saved_in_memory = 0;
  plan.measures_offload = false;
  return plan;
}

TrainingPlan place_training(const TrainingPlanInput& input) {
  // A streamed model of Python goes unit by unit even where all has room, and units that stay are
  // in the host's memory. So does a stage in chunks: another one has no room.
  const bool by_unit =
      input.memory.program == TrainingProgram::kPython || input.memory.chunk_units > 0;
  if (by_unit && input.streams.ok()) {
    return StreamPlan(input, /*offloads=*/false).make();
  }
  const bool automatic = input.activations == Activations::kAuto;
  if (automatic || input.activations == Activations::kKeep) {
    TrainingPlan keep = stay_plan(input, false);
    if (!automatic || fits(keep.memory, input)) return keep;
  }
  if (input.activations == Activations::kOffload && input.streams.ok() && input.spools) {
    return StreamPlan(input, /*offloads=*/true).make();
  }
  const TrainingPlan recompute = stay_plan(input, true);
  if (!input.streams.ok()) return recompute;
  const bool all_stay = fits(recompute.memory, input);
  if (automatic && input.spools && fits(StreamPlan(input, /*offloads=*/true).memory(), input)) {
    TrainingPlan offload = StreamPlan(input, /*offloads=*/true).make();
    if (!all_stay || keeps_as_much(offload, recompute, input.memory.gpu)) return offload;
  }
  return all_stay ? recompute : StreamPlan(input, /*offloads=*/false).make();
}

base::Result<TrainingPlan> plan_training(const TrainingPlanInput& input) {
  TrainingPlan plan = place_training(input);
  if (fits(plan.memory, input)) return plan;
  base::Status status = does_not_fit(plan.memory, input);
  if (plan.recompute && !plan.streams) {
    return std::move(status).with_context(input.streams.what());
  }
  return status;
}

}  // namespace smartinf::plan
