#include "smartinf/plan/inference_memory.h"

#include <algorithm>
#include <span>
#include <string>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/plan/slots.h"

namespace smartinf::plan {
namespace {

/// One unit held (with a tied head two), one that is being read; on a GPU one more if it fits.
constexpr uint32_t kInferenceHostSlots = 3;
constexpr uint32_t kInferenceAcceleratorSlots = 2;

InferencePlan plan_of(const InferenceMemoryInput& input, uint32_t in_memory,
                      uint32_t on_accelerator,
                      uint32_t accelerator_slots = kInferenceAcceleratorSlots) {
  const auto all = static_cast<uint32_t>(input.units.size());
  const std::span<const Unit> units(input.units);
  const auto in_slots = [&](uint32_t first, uint32_t slots) {
    return input.value_bytes * slot_elements(units.subspan(first), slots);
  };
  InferencePlan plan;
  plan.placement = {input.gpu ? on_accelerator : in_memory, in_memory,
                    in_memory < all ? kInferenceHostSlots : 0,
                    input.gpu && on_accelerator < all ? accelerator_slots : 0};
  const UnitPlacement& placement = plan.placement;
  std::vector<MemoryPart> computing{{"adapters", input.value_bytes * input.adapters},
                                    {"keys and values", input.cache_bytes},
                                    {"activations", input.activation_bytes}};
  std::vector<MemoryPart>& host = plan.memory.host;
  host = {{"weights", input.value_bytes * elements_of(input.units, in_memory)},
          {"slots of units", in_slots(in_memory, placement.host_slots) +
                                 placement.host_slots * input.slot_padding_bytes},
          {"buffers of the devices", input.source_bytes},
          {"the process itself", input.process_bytes}};
  if (input.gpu) {
    plan.memory.accelerator = std::move(computing);
    plan.memory.accelerator.insert(
        plan.memory.accelerator.begin(),
        {{"weights", input.value_bytes * elements_of(input.units, on_accelerator)},
         {"slots of units", in_slots(on_accelerator, placement.accelerator_slots)}});
    plan.memory.accelerator.push_back({"CUDA itself (assumed)", input.gpu_library_bytes});
    host.push_back({"adapters", input.value_bytes * input.adapters});
  } else {
    host.insert(host.end(), computing.begin(), computing.end());
  }
  plan.memory.host_bytes = total_bytes(plan.memory.host);
  plan.memory.accelerator_bytes = total_bytes(plan.memory.accelerator);
  return plan;
}

}  // namespace

base::Result<InferencePlan> plan_inference(const InferenceMemoryInput& input) {
  const auto all = static_cast<uint32_t>(input.units.size());
  const uint32_t least = input.streams.ok() ? 0 : all;
  InferencePlan plan;
  for (uint32_t in_memory = all + 1; in_memory-- > least;) {
    for (uint32_t there = input.gpu ? in_memory + 1 : 1; there-- > 0;) {
      plan = plan_of(input, in_memory, there);
      if (plan.memory.host_bytes > input.host_limit_bytes) break;
      if (plan.memory.accelerator_bytes > input.accelerator_limit_bytes) continue;
      InferencePlan more = plan_of(input, in_memory, there, kInferenceAcceleratorSlots + 1);
      return more.memory.accelerator_bytes <= input.accelerator_limit_bytes ? more : plan;
    }
  }
  const bool host = plan.memory.host_bytes > input.host_limit_bytes;
  const std::string allow = fmt::format(
      "Allow {}MiB or more",
      base::divide_up(host ? plan.memory.host_bytes : plan.memory.accelerator_bytes, base::kMiB));
  return base::Status(
      base::ErrorCode::kOutOfMemory,
      std::string("generating needs ") +
          base::format_bytes(host ? plan.memory.host_bytes : plan.memory.accelerator_bytes) +
          " of " + (host ? "the host's" : "the accelerator's") + " memory at least, and " +
          base::format_bytes(host ? input.host_limit_bytes : input.accelerator_limit_bytes) +
          " may be used: " + describe_parts(host ? plan.memory.host : plan.memory.accelerator),
      input.streams.ok() ? allow + ", or generate fewer tokens of fewer prompts"
                         : allow + "; all weights have to stay in memory, because " +
                               std::string(input.streams.what()));
}

uint64_t key_value_room(uint64_t limit, uint64_t taken) {
  const uint64_t room = limit - std::min(limit, taken);
  return room > limit / 4 ? room / 4 * 3 : limit / 4;
}

uint64_t key_value_device_bytes(uint64_t room, uint64_t devices, uint64_t block_bytes,
                                uint64_t most) {
  constexpr uint64_t kBlocksMin = 16;
  return std::max(kBlocksMin * block_bytes, std::min(most, room / 4 / (devices + 1)));
}

}  // namespace smartinf::plan
