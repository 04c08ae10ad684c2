#include "smartinf/plan/memory_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include "smartinf/plan/parameter_space.h"

namespace smartinf::plan {

namespace {

/// A device with fewer subgroups than this spends its time filling and draining.
constexpr uint64_t kSubgroupsPerDeviceMin = 16;

uint64_t slot_bytes(const MemoryPlanInput& input, uint64_t elements) {
  return state_bytes(input.format, input.planes, elements) +
         base::round_up(elements * input.gradient_spill_bytes, base::kIoAlignment);
}

/// Bytes of a device for reading weights.
uint64_t weight_read_bytes(const MemoryPlanInput& input, uint64_t elements) {
  if (input.weight_read_slots == 0) return 0;
  return input.weight_read_slots *
         state_bytes(input.format, std::span(input.planes).first(1), elements);
}

/// Initialization fills one half while the other is written.
uint64_t staging_bytes(uint64_t subgroup_elements) {
  return std::max(2 * subgroup_elements * sizeof(float), staging_bytes_to_read());
}

}  // namespace

base::Status check_state_cache(uint64_t cache_bytes, uint64_t other_bytes, uint64_t host_bytes) {
  if (other_bytes <= host_bytes && cache_bytes <= host_bytes - other_bytes) return base::Status();
  const uint64_t most = host_bytes - std::min(host_bytes, other_bytes);
  return base::Status(
      base::ErrorCode::kOutOfMemory,
      fmt::format("a state cache of {} does not fit: this machine has {} of memory, and the "
                  "engine's buffers and gradients take {}",
                  base::format_bytes(cache_bytes), base::format_bytes(host_bytes),
                  base::format_bytes(other_bytes)),
      fmt::format(
          "Lower memory.state_cache to at most {}, less what the model and other programs need.",
          base::format_bytes(most)));
}

uint64_t staging_bytes_to_read() {
  // Reading needs a block of every plane, better two; casting a gradient needs one cut of it as f32
  // and once more as the type that is sent.
  const uint64_t read = 2 * 4 * base::kBlockElements * sizeof(float);
  const uint64_t cast = kGradientCutElements * (sizeof(float) + 2);
  return std::max(read, cast);
}

uint64_t state_bytes(base::StateFormat format, std::span<const base::PlaneKind> planes,
                     uint64_t elements) {
  uint64_t bytes = 0;
  for (const base::PlaneKind kind : planes) {
    const base::Encoding encoding = base::plane_encoding(format, kind);
    const uint64_t blocks = elements / base::kBlockElements;
    const uint64_t rest = elements % base::kBlockElements;
    const uint64_t plane = blocks * base::encoded_bytes(encoding, base::kBlockElements) +
                           base::encoded_bytes(encoding, rest);
    bytes += base::round_up(plane, base::kIoAlignment);
  }
  return bytes;
}

base::Result<MemoryPlan> plan_memory(const MemoryPlanInput& input) {
  const uint64_t devices = std::max<uint32_t>(input.devices, 1);
  const auto needed = [&](uint64_t elements, uint64_t slots) {
    return staging_bytes(elements) +
           devices * (slots * slot_bytes(input, elements) + weight_read_bytes(input, elements));
  };
  uint64_t elements = input.subgroup_elements;
  if (elements != 0) {
    elements = base::round_up(std::min(elements, std::max<uint64_t>(input.elements, 1)),
                              base::kBlockElements);
  } else {
    const uint64_t share = base::divide_up(input.elements, devices * kSubgroupsPerDeviceMin);
    elements = std::clamp(base::round_up(share, base::kBlockElements), base::kBlockElements,
                          kSubgroupElementsMax);
    // Four slots keep a read, an update and two writes going.
    while (elements > base::kBlockElements && needed(elements, 4) > input.budget_bytes) {
      elements = base::round_up(elements / 2, base::kBlockElements);
    }
  }
  const uint64_t least = needed(elements, kSlotsMin);
  if (least > input.budget_bytes) {
    std::string advice = fmt::format("Set it to at least {}", base::format_bytes(least));
    if (input.subgroup_elements != 0 && elements > base::kBlockElements) {
      advice += " or make the subgroups smaller";
    }
    return base::Status(
        base::ErrorCode::kOutOfMemory,
        fmt::format("a memory budget of {} is too small for {} device{} with subgroups of {} "
                    "parameters",
                    base::format_bytes(input.budget_bytes), devices, devices == 1 ? "" : "s",
                    elements),
        advice + ".");
  }
  MemoryPlan plan;
  plan.subgroup_elements = elements;
  plan.slot_bytes = slot_bytes(input, elements);
  plan.staging_bytes = staging_bytes(elements);
  const uint64_t read_bytes = weight_read_bytes(input, elements);
  const uint64_t fit = (input.budget_bytes - plan.staging_bytes - devices * read_bytes) /
                       (devices * plan.slot_bytes);
  plan.slots = static_cast<uint32_t>(std::min<uint64_t>(fit, kSlotsMax));
  plan.device_bytes = plan.slots * plan.slot_bytes + read_bytes;
  return plan;
}

uint64_t buffer_bytes(const MemoryPlan& plan, uint64_t elements, uint32_t devices,
                      const DriveSlots& drives) {
  DeviceSlotsInput input;
  input.memory_bytes = plan.slots * plan.slot_bytes;
  input.slot_bytes = plan.slot_bytes;
  input.subgroups = base::divide_up(elements, plan.subgroup_elements * devices);
  input.slots = drives.slots;
  input.in_flight_bytes = drives.in_flight_bytes;
  const uint64_t read_bytes = plan.device_bytes - input.memory_bytes;
  return plan.staging_bytes + devices * (device_slots(input) * plan.slot_bytes + read_bytes);
}

uint64_t device_slots(const DeviceSlotsInput& input) {
  if (input.slot_bytes == 0) return 1;
  const uint64_t slots =
      std::min<uint64_t>({input.memory_bytes / input.slot_bytes, uint64_t{kSlotsMax},
                          std::max<uint64_t>(input.subgroups, 1)});
  if (input.slots > 0) return std::min<uint64_t>(slots, input.slots);
  // Slots that also collect spilled gradients are never too many.
  if (input.gradients_spilled) return slots;
  // As many as the transfers take that were found to fill the drive, each way, and two at the
  // processor.
  const uint64_t in_flight = std::min(input.in_flight_bytes, kSlotsMax * input.slot_bytes);
  const uint64_t each_way = base::divide_up(in_flight, input.slot_bytes);
  return std::min(slots, std::max<uint64_t>(2 * each_way + 2, kSlotsEnough));
}

}  // namespace smartinf::plan
