#include "smartinf/engine/new_run.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/device_build.h"
#include "smartinf/engine/device_share.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/memory.h"
#include "smartinf/engine/ranks/ranks_updater.h"
#include "smartinf/engine/run_description.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/plan/placement.h"
#include "smartinf/storage/format.h"

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
                              std::span<const DeviceId> present,
                              std::span<const plan::RankSpan> stages) {
  const uint64_t subgroup_bytes = state.subgroup_bytes();
  Placement places;
  std::vector<plan::DeviceCapacity> capacities;
  for (size_t d = 0; d < sources.size(); ++d) {
    SI_ASSIGN_OR_RETURN(const uint64_t free_bytes, sources[d]->capacity_bytes());
    plan::DeviceCapacity& capacity = capacities.emplace_back();
    capacity.elements_max = free_bytes / subgroup_bytes * state.subgroup_elements;
    if (!bandwidths.empty()) capacity.bandwidth = bandwidths[d];
    capacity.rank = sources[d]->rank();
    places.free_text += fmt::format("{}{} on {}", places.free_text.empty() ? "" : ", ",
                                    base::format_bytes(free_bytes), sources[d]->name());
  }
  auto owner = plan::place_by_stage(subgroups, capacities, stages);
  if (stages.empty() || !owner.ok()) owner = plan::place(subgroups, capacities, present);
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
/// those out of the list, and returns what to say of them; owner: of every subgroup, by position in
/// it.
std::vector<std::string> leave_out_idle(DeviceSources& sources, std::vector<DeviceId>& owner) {
  std::vector<std::string> left_out;
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
    left_out.push_back(
        fmt::format("device {} is left out: none of the {} subgroups of the state is placed on it, "
                    "because the model is small, or the device is slow or nearly full beside the "
                    "others",
                    sources[d]->name(), owner.size()));
  }
  sources = std::move(used);
  for (DeviceId& device : owner) device.value = position[device.value];
  return left_out;
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

/// A new run as it is decided before anything is made.
struct NewRun {
  DeviceSet set;  // without devices
  plan::MemoryPlan memory;
  storage::StoreLayout layout;  // set_device() makes it a device's
  std::vector<uint64_t> spool;  // of each device
  std::vector<std::string> notices;

  DeviceShare share_of(const UpdaterOptions& options, const plan::ParameterSpace& space,
                       uint32_t device) {
    const uint64_t elements = set_device(layout, DeviceId{device}, set.subgroups, set.owner);
    DeviceShare share = device_share(options, space, memory.device_bytes, elements);
    share.spool_bytes = spool[device];
    return share;
  }
};

/// Sources that no subgroup falls to are taken out.
Result<NewRun> plan_new_run(const UpdaterOptions& options, const plan::ParameterSpace& space,
                            DeviceSources& sources) {
  StateSize state;
  state.format = options.format;
  state.planes = state_planes(options.rule.rule, options.compress.residual_on_devices());
  state.durability = options.durability;
  state.gradient_spill_bytes = gradient_spill_bytes(options, space);
  NewRun run;
  SI_ASSIGN_OR_RETURN(run.memory,
                      plan_buffers(options, space, static_cast<uint32_t>(sources.size())));
  state.subgroup_elements = run.memory.subgroup_elements;

  DeviceSet& set = run.set;
  set.fresh = true;
  set.residual = options.compress.residual_on_devices();
  set.staging_bytes = run.memory.staging_bytes;
  set.subgroups = plan::cut_by_stage(space.subgroups(run.memory.subgroup_elements), options.stages);
  if (options.durability == storage::Durability::kNone) {
    run.notices.emplace_back(
        "durability \"none\": the state is overwritten in place; after a crash in the middle of a "
        "step nothing of it can be used");
  }
  std::vector<double> bandwidths(sources.size(), 1);
  for (size_t d = 0; sources.size() > 1 && d < sources.size(); ++d) {
    SI_ASSIGN_OR_RETURN(bandwidths[d], sources[d]->bandwidth());
  }
  SI_ASSIGN_OR_RETURN(Placement places, place_state(state, set.subgroups, sources, bandwidths,
                                                    /*present=*/{}, options.stages));
  set.owner = std::move(places.owner);
  std::ranges::move(leave_out_idle(sources, set.owner), std::back_inserter(run.notices));
  SI_ASSIGN_OR_RETURN(run.spool, share_spool(options.spool_bytes, sources));
  run.layout = layout_of_run(state, options.rule.rule, space, sources);
  return run;
}

uint32_t slots_of(storage::Durability durability) {
  return durability == storage::Durability::kStep ? 2 : 1;
}

/// Bytes that go free on a device when the state that it holds is erased. Errors: of what would
/// keep a new one from being made there.
Result<uint64_t> bytes_of_old(const UpdaterOptions& options, const DeviceBuild& build,
                              DeviceSource& source) {
  const bool remote = serve::is_remote(build.device.path);
  Collectives* const ranks = options.collectives.get();
  Status possible;
  if (!remote && (ranks == nullptr || ranks->rank() == build.device.rank)) {
    possible = refuse_checkpoint_device(build.device.path);
    if (const auto make = build.options(options, DeviceShare{}).make_processor;
        possible.ok() && make) {
      possible = make([](csd::Job&) {}).status();
    }
    possible = std::move(possible).with_context("device " + source.name());
  }
  if (ranks != nullptr) possible = all_ok(*ranks, Channel::kControl, "look at devices", possible);
  SI_RETURN_IF_ERROR(possible);
  // Both answer to whoever could write there now. Measuring writes, so a server refuses it where
  // somebody else does.
  if (remote) SI_RETURN_IF_ERROR(source.bandwidth().status());
  const auto held =
      source.snapshot(remote ? storage::ReaderLock::kLeave : storage::ReaderLock::kTake);
  if (held.status().code() == ErrorCode::kBusy) return held.status();
  std::error_code error;
  const bool all_is_free = std::filesystem::is_block_file(build.device.path, error);
  if (all_is_free) return uint64_t{0};
  // Among ranks, where a device says less, the least that the old state takes.
  const auto summary = source.summarize();
  if (summary.ok()) return summary->container_bytes;
  if (!held.ok()) return uint64_t{0};
  SI_ASSIGN_OR_RETURN(
      const auto least,
      storage::Geometry::make((*held)->layout(), slots_of(storage::Durability::kNone)));
  return least.container_bytes();
}

/// Devices that have one drive, and no limits of their own: bytes.
struct SharedDrive {
  uint64_t free = 0;
  uint64_t old = 0;
  uint64_t needed = 0;
};

Status check_room(const std::string& where, uint64_t needed, uint64_t room) {
  if (needed <= room) return Status();
  return Status(ErrorCode::kNoSpace,
                fmt::format("{} would need {}, and has room for {}", where,
                            base::format_bytes(needed), base::format_bytes(room)),
                "Free space there, add a device, or choose a smaller state format.");
}

/// A device as it will be when the state on it is erased.
class ErasedSource final : public DeviceSource {
 public:
  ErasedSource(std::unique_ptr<DeviceSource> source, uint64_t capacity_bytes)
      : source_(std::move(source)), capacity_bytes_(capacity_bytes) {}
  const std::string& name() const override { return source_->name(); }
  std::string place() const override { return source_->place(); }
  uint32_t rank() const override { return source_->rank(); }
  std::string drive() const override { return source_->drive(); }
  Result<std::optional<storage::StoreState>> peek() override { return nothing_; }
  Result<double> bandwidth() override { return source_->bandwidth(); }
  Result<uint64_t> capacity_bytes() override { return capacity_bytes_; }
  Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout&,
                                              const DeviceShare&) override {
    return only_looked_at();
  }
  Result<std::unique_ptr<csd::Device>> open(const DeviceShare&) override {
    return only_looked_at();
  }
  Status erase() override { return only_looked_at(); }

 private:
  static Status only_looked_at() {
    return Status(ErrorCode::kFailedPrecondition, "a device that is only looked at",
                  "This is a bug in smartinf; please report it.");
  }
  const std::unique_ptr<DeviceSource> source_;
  const uint64_t capacity_bytes_;
  const std::optional<storage::StoreState> nothing_;
};

}  // namespace

Status check_new_run(const UpdaterOptions& options, const plan::ParameterSpace& space,
                     const storage::RunId& old) {
  if (options.collectives != nullptr && options.collectives->world() > 1) {
    return RanksUpdater::check_new_run(options, space, local_sources(options), old);
  }
  UpdaterOptions alone = options;
  alone.collectives = alone.peers = nullptr;
  return check_new_run(alone, space, local_sources(alone), old);
}

Status check_new_run(const UpdaterOptions& options, const plan::ParameterSpace& space,
                     DeviceSources sources, const storage::RunId& old) {
  SI_RETURN_IF_ERROR(check_device_options(options, space));
  SI_RETURN_IF_ERROR(check_places(sources));
  const std::vector<DeviceBuild> builds = device_builds(options);
  // Drives by name, which among ranks is not known; and which device has which.
  std::map<std::string, SharedDrive> drives;
  std::map<std::string, std::string> drive_of;
  for (size_t d = 0; d < sources.size(); ++d) {
    auto& source = sources[d];
    SI_ASSIGN_OR_RETURN(const std::optional<storage::StoreState> state, source->peek());
    if (state && !(state->run == old)) {
      return Status(
          ErrorCode::kMismatch,
          fmt::format("device {} holds a state of run {}, and not of run {}", source->name(),
                      state->run.to_string().substr(0, 8), old.to_string().substr(0, 8)),
          "Name other devices, or free this one first.");
    }
    SI_ASSIGN_OR_RETURN(const uint64_t free, source->capacity_bytes());
    uint64_t taken = 0;
    if (state) {
      SI_ASSIGN_OR_RETURN(taken, bytes_of_old(options, builds[d], *source));
    }
    const DeviceOptions& device = builds[d].device;
    // Limits that a server has of its own are not known here.
    uint64_t room = serve::is_remote(device.path) ? std::max(free, taken) : free + taken;
    if (device.capacity_bytes != 0) {
      room = std::min(room, device.capacity_bytes);
    } else if (!serve::is_remote(device.path)) {
      drive_of[source->place()] = source->drive();
      SharedDrive& shared = drives[source->drive()];
      shared.free = std::max(shared.free, free);
      shared.old += taken;
    }
    source = std::make_unique<ErasedSource>(std::move(source), room);
  }
  SI_ASSIGN_OR_RETURN(NewRun run, plan_new_run(options, space, sources));
  for (uint32_t d = 0; d < sources.size(); ++d) {
    const DeviceShare share = run.share_of(options, space, d);
    SI_ASSIGN_OR_RETURN(const auto geometry,
                        storage::Geometry::make(run.layout, slots_of(options.durability)));
    SI_ASSIGN_OR_RETURN(const uint64_t room, sources[d]->capacity_bytes());
    const uint64_t needed = geometry.container_bytes() + share.spool_bytes;
    SI_RETURN_IF_ERROR(check_room("device " + sources[d]->name(), needed, room));
    const auto drive = drive_of.find(sources[d]->place());
    if (drive != drive_of.end()) drives[drive->second].needed += needed;
  }
  for (const auto& [drive, shared] : drives) {
    if (drive.empty()) continue;
    SI_RETURN_IF_ERROR(
        check_room("the drive of several devices", shared.needed, shared.free + shared.old));
  }
  return Status();
}

Result<DeviceSet> create_devices(const UpdaterOptions& options, const plan::ParameterSpace& space,
                                 DeviceSources& sources) {
  SI_ASSIGN_OR_RETURN(NewRun run, plan_new_run(options, space, sources));
  DeviceSet& set = run.set;
  for (const std::string& notice : run.notices) base::log(base::LogLevel::kWarning, notice);
  for (uint32_t d = 0; d < sources.size(); ++d) {
    const DeviceShare share = run.share_of(options, space, d);
    auto device = sources[d]->create(run.layout, share);
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
  return std::move(set);
}

}  // namespace smartinf::engine
