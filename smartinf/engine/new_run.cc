#include "smartinf/engine/new_run.h"

#include <utility>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/device_share.h"
#include "smartinf/engine/memory.h"
#include "smartinf/engine/run_description.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/plan/placement.h"

namespace smartinf::engine {

using base::DeviceId;
using base::ErrorCode;
using base::Result;
using base::Status;

uint64_t StateSize::subgroup_bytes() const {
  const uint64_t copies = durability == storage::Durability::kStep ? 2 : 1;
  return copies * plan::state_bytes(format, planes, subgroup_elements) +
         subgroup_elements * gradient_spill_bytes;
}

Result<Placement> place_state(const StateSize& state, std::span<const plan::Subgroup> subgroups,
                              const DeviceSources& sources, std::span<const double> bandwidths,
                              std::span<const DeviceId> present) {
  const uint64_t subgroup_bytes = state.subgroup_bytes();
  Placement places;
  std::vector<plan::DeviceCapacity> capacities;
  for (size_t d = 0; d < sources.size(); ++d) {
    SI_ASSIGN_OR_RETURN(const uint64_t free_bytes, sources[d]->capacity_bytes());
    plan::DeviceCapacity& capacity = capacities.emplace_back();
    capacity.elements_max = free_bytes / subgroup_bytes * state.subgroup_elements;
    if (!bandwidths.empty()) capacity.bandwidth = bandwidths[d];
    places.free_text += fmt::format("{}{} on {}", places.free_text.empty() ? "" : ", ",
                                    base::format_bytes(free_bytes), sources[d]->name());
  }
  auto owner = plan::place(subgroups, capacities, present);
  if (!owner.ok() && owner.status().code() == ErrorCode::kNoSpace) {
    return Status(
        ErrorCode::kNoSpace,
        fmt::format("the optimizer state needs {}, and {} are free",
                    base::format_bytes(subgroup_bytes * subgroups.size()), places.free_text),
        "Free space there, add a device, or choose a smaller state format.");
  }
  SI_ASSIGN_OR_RETURN(places.owner, std::move(owner));
  return places;
}

uint64_t set_device(storage::StoreLayout& layout, DeviceId device,
                    std::span<const plan::Subgroup> subgroups, std::span<const DeviceId> owner) {
  layout.device_index = device.value;
  layout.subgroups.clear();
  uint64_t elements = 0;
  for (const plan::Subgroup& subgroup : subgroups) {
    if (owner[subgroup.id.value] != device) continue;
    layout.subgroups.push_back({subgroup.id, subgroup.first, subgroup.count});
    elements += subgroup.count;
  }
  return elements;
}

namespace {

/// A small model may have no subgroup for a device, nor a very slow or a full one a share. Takes
/// those out of the list and says so; owner: of every subgroup, by position in it.
void leave_out_idle(DeviceSources& sources, std::vector<DeviceId>& owner) {
  std::vector<uint32_t> subgroups(sources.size(), 0);
  for (const DeviceId device : owner) ++subgroups[device.value];
  std::vector<uint32_t> position(sources.size(), 0);
  DeviceSources used;
  for (size_t d = 0; d < sources.size(); ++d) {
    position[d] = static_cast<uint32_t>(used.size());
    if (subgroups[d] > 0) {
      used.push_back(std::move(sources[d]));
      continue;
    }
    base::log(base::LogLevel::kWarning,
              fmt::format("device {} is left out: none of the {} subgroups of the state is placed "
                          "on it, because the model is small, or the device is slow or nearly full "
                          "beside the others",
                          sources[d]->name(), owner.size()));
  }
  sources = std::move(used);
  for (DeviceId& device : owner) device.value = position[device.value];
}

storage::StoreLayout layout_of_run(const StateSize& state, kernels::UpdateRule rule,
                                   const plan::ParameterSpace& space,
                                   const DeviceSources& sources) {
  RunDescription description;
  description.space = space;
  description.rule = rule;
  for (const auto& source : sources) description.devices.push_back(source->name());
  storage::StoreLayout layout;
  layout.run = storage::make_run_id();
  layout.device_count = static_cast<uint32_t>(sources.size());
  layout.format = state.format;
  layout.planes = state.planes;
  layout.gradient_spill_bytes = state.gradient_spill_bytes;
  layout.description = to_json(description);
  return layout;
}

}  // namespace

Result<DeviceSet> create_devices(const UpdaterOptions& options, const plan::ParameterSpace& space,
                                 DeviceSources& sources) {
  StateSize state;
  state.format = options.format;
  state.planes = state_planes(options.rule.rule, options.compress.residual_on_devices());
  state.durability = options.durability;
  state.gradient_spill_bytes = gradient_spill_bytes(options, space);
  SI_ASSIGN_OR_RETURN(const plan::MemoryPlan memory,
                      plan_buffers(options, space, static_cast<uint32_t>(sources.size())));
  state.subgroup_elements = memory.subgroup_elements;

  DeviceSet set;
  set.fresh = true;
  set.residual = options.compress.residual_on_devices();
  set.staging_bytes = memory.staging_bytes;
  set.subgroups = space.subgroups(memory.subgroup_elements);
  if (options.durability == storage::Durability::kNone) {
    base::log(base::LogLevel::kWarning,
              "durability \"none\": the state is overwritten in place; after a crash in the middle "
              "of a step nothing of it can be used");
  }
  std::vector<double> bandwidths(sources.size(), 1);
  for (size_t d = 0; sources.size() > 1 && d < sources.size(); ++d) {
    SI_ASSIGN_OR_RETURN(bandwidths[d], sources[d]->bandwidth());
  }
  SI_ASSIGN_OR_RETURN(Placement places, place_state(state, set.subgroups, sources, bandwidths));
  set.owner = std::move(places.owner);
  leave_out_idle(sources, set.owner);

  SI_ASSIGN_OR_RETURN(const auto spool, share_spool(options.spool_bytes, sources));
  storage::StoreLayout layout = layout_of_run(state, options.rule.rule, space, sources);
  for (uint32_t d = 0; d < sources.size(); ++d) {
    const uint64_t elements = set_device(layout, DeviceId{d}, set.subgroups, set.owner);
    DeviceShare share = device_share(options, space, memory.device_bytes, elements);
    share.spool_bytes = spool[d];
    auto device = sources[d]->create(layout, share);
    if (!device.ok()) {
      // Leave nothing behind: the others would look like an interrupted creation.
      set.devices.clear();
      for (uint32_t made = 0; made < d; ++made) {
        if (const Status erased = sources[made]->erase(); !erased.ok()) {
          base::log(base::LogLevel::kWarning, erased.to_string());
        }
      }
      return std::move(device).status();
    }
    set.devices.push_back(std::move(device).value());
  }
  return set;
}

}  // namespace smartinf::engine
