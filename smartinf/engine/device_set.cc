#include "smartinf/engine/device_set.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/device_share.h"
#include "smartinf/engine/memory.h"
#include "smartinf/engine/new_run.h"
#include "smartinf/engine/run_description.h"
#include "smartinf/plan/memory_plan.h"
#include "smartinf/plan/state_cache.h"

namespace smartinf::engine {

using base::DeviceId;
using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

using Sources = std::vector<std::unique_ptr<DeviceSource>>;

constexpr std::string_view kOtherPlaceAdvice =
    "Give this run another directory, or go on with the model and the rule of that state.";

std::string device_text(const DeviceSource& source) { return "device " + source.name(); }

/// Bytes of the rule's planes, which updates move and a cache holds.
uint64_t moved_bytes(const UpdaterOptions& options, uint64_t elements) {
  return state_bytes(options.rule.rule, options.format, elements);
}

Status check_cache_fits(const UpdaterOptions& options, const plan::ParameterSpace& space) {
  if (options.state_cache_bytes == 0) return Status();
  const uint64_t gradients =
      std::min(gradient_bytes(options, space), options.gradient_budget_bytes);
  return plan::check_state_cache(
      std::min(options.state_cache_bytes, moved_bytes(options, space.count())),
      options.memory_budget_bytes + gradients, host_memory_bytes());
}

/// Tells the devices which state stays in memory. sources: in the devices' order.
Status cache_state(const UpdaterOptions& options, std::span<DeviceSource* const> sources,
                   DeviceSet& set) {
  if (options.state_cache_bytes == 0) return Status();
  std::vector<plan::CachedDevice> shares;
  for (size_t d = 0; d < set.devices.size(); ++d) {
    plan::CachedDevice share;
    for (const storage::StoredSubgroup& stored : set.devices[d]->layout().subgroups) {
      ++share.subgroups;
      share.subgroup_bytes = std::max(share.subgroup_bytes, moved_bytes(options, stored.count));
    }
    if (set.devices.size() > 1) {
      SI_ASSIGN_OR_RETURN(share.bandwidth, sources[d]->bandwidth());
    }
    shares.push_back(share);
  }
  const bool writes_too = options.durability == storage::Durability::kNone;
  const auto cached = plan::share_state_cache(shares, options.state_cache_bytes, writes_too);
  for (size_t d = 0; d < set.devices.size(); ++d) {
    std::vector<base::SubgroupId> ids;
    const auto& stored = set.devices[d]->layout().subgroups;
    for (size_t i = 0; i < stored.size(); ++i) {
      if (plan::stays_in_memory(i, cached[d], stored.size())) ids.push_back(stored[i].id);
    }
    SI_RETURN_IF_ERROR(set.devices[d]->cache_state(ids));
  }
  return Status();
}

/// Whether what a device holds fits the model and options of this run.
Status check_device(const UpdaterOptions& options, const plan::ParameterSpace& space,
                    const DeviceSource& source, const storage::StoreLayout& layout,
                    const RunDescription& description) {
  if (const std::string difference =
          plan::ParameterSpace::first_difference(space, description.space);
      !difference.empty()) {
    return Status(ErrorCode::kMismatch,
                  fmt::format("{} holds the state of a different model ({})", device_text(source),
                              difference),
                  std::string(kOtherPlaceAdvice));
  }
  if (const std::string difference =
          plan::ParameterSpace::first_other_group(space, description.space);
      !difference.empty()) {
    return Status(ErrorCode::kMismatch,
                  fmt::format("{} holds state whose parameters belong to other groups ({})",
                              device_text(source), difference),
                  std::string(plan::kOtherGroupsAdvice));
  }
  if (description.rule != options.rule.rule) {
    return Status(ErrorCode::kMismatch,
                  fmt::format("{} holds state of the update rule {}, not {}", device_text(source),
                              kernels::update_rule_name(description.rule),
                              kernels::update_rule_name(options.rule.rule)),
                  std::string(kOtherPlaceAdvice));
  }
  if (layout.format != options.format) {
    return Status(
        ErrorCode::kMismatch,
        fmt::format("{} holds state in the format {}, not {}", device_text(source),
                    base::state_format_name(layout.format),
                    base::state_format_name(options.format)),
        fmt::format("Keep its format (optimizer.format = \"{0}\" and optimizer.master = \"{1}\", "
                    "or state_format=\"{0}\" and master=\"{1}\" in Python), or make a copy in the "
                    "other one: smartinf reshard --state-format {2} --master {3}.",
                    base::enum_name(layout.format.moments), base::enum_name(layout.format.master),
                    base::enum_name(options.format.moments),
                    base::enum_name(options.format.master)));
  }
  if (options.compress.residual_on_devices() &&
      layout.planes.back() != base::PlaneKind::kResidual) {
    return Status(ErrorCode::kMismatch,
                  fmt::format("{} was made without room for the residual of compressed gradients",
                              device_text(source)),
                  "Set compress.residual_every = 0, so that the residual is lost at a restart, or "
                  "start a new run in other directories.");
  }
  if (!options.compress.on() && layout.gradient_spill_bytes == 0 &&
      gradient_bytes(options, space) > options.gradient_budget_bytes) {
    return Status(
        ErrorCode::kOutOfMemory,
        fmt::format("{} was made without room for spilled gradients; they need {} of memory, and "
                    "the gradient budget is {}",
                    device_text(source), base::format_bytes(gradient_bytes(options, space)),
                    base::format_bytes(options.gradient_budget_bytes)),
        "Raise the gradient budget.");
  }
  return Status();
}

/// The subgroups of all devices together: each once, and without gaps.
Status join_subgroups(const plan::ParameterSpace& space, DeviceSet& set) {
  size_t count = 0;
  for (const auto& device : set.devices) count += device->layout().subgroups.size();
  set.subgroups.assign(count, plan::Subgroup{});
  set.owner.assign(count, DeviceId{});
  for (uint32_t d = 0; d < set.devices.size(); ++d) {
    for (const storage::StoredSubgroup& stored : set.devices[d]->layout().subgroups) {
      if (stored.id.value < count) {
        set.subgroups[stored.id.value] = {stored.id, stored.first_element, stored.count};
        set.owner[stored.id.value] = DeviceId{d};
      }
    }
  }
  uint64_t next = 0;
  for (const plan::Subgroup& subgroup : set.subgroups) {
    if (subgroup.count == 0 || subgroup.first != next) {
      return Status(ErrorCode::kCorrupt,
                    fmt::format("the devices together do not hold every parameter once: element {} "
                                "is missing or there twice",
                                next),
                    "Run smartinf fsck on each device.");
    }
    next += subgroup.count;
  }
  if (next != space.count()) {
    return Status(ErrorCode::kCorrupt,
                  fmt::format("the devices together hold {} of {} parameters", next, space.count()),
                  "Run smartinf fsck on each device.");
  }
  return Status();
}

/// One opened device with what it says of its run.
struct Opened {
  DeviceSource* source = nullptr;
  std::unique_ptr<csd::Device> device;
  RunDescription description;
};

/// Puts the devices in the run's order. Errors: of different runs, copies, or not all of them.
Status order_devices(std::vector<Opened>& opened, DeviceSet& set,
                     std::vector<DeviceSource*>& sources) {
  const Opened& first = opened.front();
  const storage::StoreLayout& run = first.device->layout();
  for (const Opened& other : opened) {
    if (!(other.device->layout().run == run.run)) {
      return Status(ErrorCode::kMismatch,
                    fmt::format("{} belongs to run {}, but {} to run {}",
                                device_text(*other.source), other.device->layout().run.to_string(),
                                device_text(*first.source), run.run.to_string()),
                    "Name the devices of one run only.");
    }
  }
  std::vector<Opened*> by_index(run.device_count, nullptr);
  for (Opened& other : opened) {
    const uint32_t index = other.device->layout().device_index;
    if (index >= by_index.size()) {
      return Status(ErrorCode::kCorrupt,
                    fmt::format("{} says that it is device {} of {}", device_text(*other.source),
                                index + 1, by_index.size()),
                    "Run smartinf fsck on it.");
    }
    if (by_index[index] != nullptr) {
      return Status(ErrorCode::kMismatch,
                    fmt::format("devices {} and {} are copies of one device",
                                by_index[index]->source->name(), other.source->name()),
                    "Name each device of the run once.");
    }
    by_index[index] = &other;
  }
  for (size_t i = 0; i < by_index.size(); ++i) {
    if (by_index[i] != nullptr) continue;
    const auto& names = first.description.devices;
    return Status(ErrorCode::kNotFound,
                  fmt::format("the run on {} has {} devices; {} is not among those given",
                              device_text(*first.source), by_index.size(),
                              i < names.size() ? names[i] : fmt::format("number {}", i + 1)),
                  "Name all devices that the run was started with.");
  }
  for (Opened* each : by_index) {
    set.devices.push_back(std::move(each->device));
    sources.push_back(each->source);
  }
  return Status();
}

Result<DeviceSet> open_all(const UpdaterOptions& options, const plan::ParameterSpace& space,
                           Sources& sources) {
  const auto count = static_cast<uint32_t>(sources.size());
  DeviceSet set;
  set.staging_bytes = plan::staging_bytes_to_read();
  const uint64_t least = set.staging_bytes + count * base::kBlockElements;
  if (options.memory_budget_bytes < least) {
    return Status(
        ErrorCode::kOutOfMemory,
        fmt::format("a memory budget of {} is too small for {} device{}",
                    base::format_bytes(options.memory_budget_bytes), count, count == 1 ? "" : "s"),
        fmt::format("Allow at least {}.", base::format_bytes(least)));
  }
  const uint64_t slot_memory_bytes = (options.memory_budget_bytes - set.staging_bytes) / count;
  SI_ASSIGN_OR_RETURN(const auto spool, share_spool(options.spool_bytes, sources));
  std::vector<Opened> opened;
  for (const auto& source : sources) {
    Opened each;
    each.source = source.get();
    DeviceShare share = device_share(options, space, slot_memory_bytes, space.count() / count);
    share.spool_bytes = spool[opened.size()];
    SI_ASSIGN_OR_RETURN(each.device, source->open(share));
    auto described = run_description_from_json(each.device->layout().description);
    if (!described.ok()) return std::move(described).status().with_context(device_text(*source));
    each.description = std::move(described).value();
    SI_RETURN_IF_ERROR(
        check_device(options, space, *source, each.device->layout(), each.description));
    opened.push_back(std::move(each));
  }
  std::vector<DeviceSource*> in_order;
  SI_RETURN_IF_ERROR(order_devices(opened, set, in_order));
  SI_RETURN_IF_ERROR(join_subgroups(space, set));
  set.residual = set.devices.front()->layout().planes.back() == base::PlaneKind::kResidual;

  std::vector<storage::StoreState> states;
  for (const auto& device : set.devices) states.push_back(device->state());
  SI_ASSIGN_OR_RETURN(set.step, storage::recovery_step(states));
  if (options.recover_to && *options.recover_to != set.step) {
    for (const storage::StoreState& state : states) {
      if (state.committed_step == *options.recover_to) continue;
      return Status(
          ErrorCode::kMismatch,
          fmt::format("{} holds step {}, but the ranks of the run agreed on step {}",
                      set.devices[state.device_index]->info().name, set.step, *options.recover_to),
          "Load the last checkpoint.");
    }
    set.step = *options.recover_to;
  }
  for (const auto& device : set.devices) SI_RETURN_IF_ERROR(device->recover_to(set.step));
  SI_RETURN_IF_ERROR(cache_state(options, in_order, set));
  return set;
}

/// State that the devices hold before any of them is opened.
struct Found {
  // One of each sort; null: none.
  const DeviceSource* holding = nullptr;
  const DeviceSource* empty = nullptr;
  const DeviceSource* unfinished = nullptr;
  std::vector<DeviceSource*> begun;  // hold something, finished or not
  bool one_run = true;
  uint32_t run_devices = 0;
  base::StepNumber newest = 0;
  bool complete = false;  // some device's first step is committed
  base::StepNumber copied_step = 0;

  /// The first step becomes real device by device; until the last one has it, nothing was trained.
  bool interrupted() const {
    return unfinished != nullptr && (holding == nullptr || (one_run && (newest == 0 || !complete)));
  }
};

Result<Found> look_at(const Sources& sources) {
  Found found;
  std::optional<storage::RunId> run;
  for (const auto& source : sources) {
    SI_ASSIGN_OR_RETURN(const std::optional<storage::StoreState> state, source->peek());
    if (!state) {
      found.empty = source.get();
      continue;
    }
    found.begun.push_back(source.get());
    found.one_run = found.one_run && (!run || *run == state->run);
    run = state->run;
    found.run_devices = state->device_count;
    found.complete = found.complete || state->complete;
    found.copied_step = std::max(found.copied_step, state->copied_step);
    // A torn state is a run's too: recovery says so, and does not start over by itself.
    if (state->initialized || state->torn) {
      found.holding = source.get();
      found.newest = std::max(found.newest, state->prepared_step);
    } else {
      found.unfinished = source.get();
    }
  }
  return found;
}

/// With an eps of 0, an element whose gradients were all 0 becomes 0 / 0. An f32 holds this one
/// also where Adam makes it smaller by sqrt(1 - beta2). (config/check.cc has the same for recipes.)
constexpr double kEpsMin = 1e-30;

Status check_rule(const kernels::RuleOptions& rule) {
  using kernels::UpdateRule;
  const bool divides = rule.rule != UpdateRule::kSgdMomentum && rule.rule != UpdateRule::kLion;
  if (!divides || (rule.eps >= kEpsMin && rule.eps <= 1)) return Status();
  return Status(
      ErrorCode::kInvalidArgument,
      fmt::format("eps is {}: where gradients are 0, weights would become 0 / 0", rule.eps),
      fmt::format("Choose a value from {} to 1; 1e-8 is usual.", kEpsMin));
}

/// Refuses for remote devices what works on this machine only, and what a server does its own way.
Status check_remote(const UpdaterOptions& options) {
  for (const DeviceOptions& device : options.devices) {
    if (!serve::is_remote(device.path)) continue;
    const bool emulated = device.internal_link.given() || options.host_link.given();
    if (options.where != UpdateWhere::kHost && !emulated) continue;
    return Status(ErrorCode::kUnsupported,
                  fmt::format("device {} is another machine's, which updates its state itself and "
                              "cannot be {}",
                              device.path, emulated ? "emulated" : "read for a host update"),
                  emulated ? "Leave the links' rates out." : "Update on the devices.");
  }
  return Status();
}

Status check_compression(const UpdaterOptions& options) {
  const compress::CompressOptions& compress = options.compress;
  const auto bad = [](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  if (compress.on() && options.where == UpdateWhere::kHost) {
    return bad("compressed gradients for a host update",
               "There no gradient crosses the host link: leave compression out, or update on the "
               "devices.");
  }
  if (compress.on() && options.stream_weights) {
    return bad("stream_weights with compression: the stored weights lag behind those in use",
               "Leave compression out, or keep all weights in memory.");
  }
  if (!(compress.density >= 0 && compress.density <= 1)) {
    return bad(fmt::format("a density of {} for compressed gradients", compress.density),
               "Choose one above 0 and at most 1: 0.08 sends the largest 8 % of the elements.");
  }
  return Status();
}

}  // namespace

Status check_places(const Sources& sources) {
  if (sources.empty()) {
    return Status(ErrorCode::kInvalidArgument, "no device is given for the optimizer state",
                  "Name at least one directory: [[device]] path = \"...\", or --device DIR.");
  }
  std::map<std::string, const DeviceSource*> by_place;
  for (const auto& source : sources) {
    // The names of all devices stand in the description that each of them carries.
    if (!base::printable(source->name()) || !base::printable(source->place())) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("the path of a device has control characters: {}", source->place()),
                    "Choose a path without tabs and line breaks.");
    }
    const auto [found, added] = by_place.emplace(source->place(), source.get());
    if (!added) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("devices {} and {} are the same place, {}", found->second->name(),
                                source->name(), found->first),
                    "Give every device a directory of its own.");
    }
  }
  return Status();
}

Status check_device_options(const UpdaterOptions& options, const plan::ParameterSpace& space) {
  const auto given = std::ranges::count_if(
      options.devices, [](const DeviceOptions& device) { return device.bandwidth > 0; });
  if (given != 0 && given != std::ssize(options.devices)) {
    return Status(ErrorCode::kInvalidArgument,
                  "some devices are given a bandwidth and others are not",
                  "Give all devices a bandwidth, or none, so that all are measured.");
  }
  SI_RETURN_IF_ERROR(check_rule(options.rule));
  SI_RETURN_IF_ERROR(check_compression(options));
  SI_RETURN_IF_ERROR(check_remote(options));
  SI_RETURN_IF_ERROR(check_cache_fits(options, space));
  if (space.count() > 0) return Status();
  return Status(ErrorCode::kInvalidArgument, "the model has no parameter to train",
                "Add its parameters to the parameter space before opening the updater.");
}

Result<DeviceSet> open_device_set(const UpdaterOptions& options, const plan::ParameterSpace& space,
                                  Sources& sources) {
  SI_RETURN_IF_ERROR(check_device_options(options, space));
  SI_RETURN_IF_ERROR(check_places(sources));
  SI_ASSIGN_OR_RETURN(Found found, look_at(sources));
  // The run began without them, or they were added since: its state is all on the others.
  if (found.holding != nullptr && found.empty != nullptr && found.one_run &&
      found.begun.size() == found.run_devices) {
    std::erase_if(sources, [&](const std::unique_ptr<DeviceSource>& source) {
      if (std::find(found.begun.begin(), found.begun.end(), source.get()) != found.begun.end())
        return false;
      base::log(
          base::LogLevel::kWarning,
          fmt::format("{} is left out: it holds no state, and the run on {} has its state on {} "
                      "other device{}. Use smartinf reshard to move a run onto more devices",
                      device_text(*source), device_text(*found.holding), found.run_devices,
                      found.run_devices == 1 ? "" : "s"));
      return true;
    });
    found.empty = nullptr;
  }
  if (found.holding != nullptr && !found.interrupted()) {
    if (const DeviceSource* missing = found.empty != nullptr ? found.empty : found.unfinished;
        missing != nullptr) {
      return Status(ErrorCode::kNotFound,
                    fmt::format("{} holds no optimizer state, but {} holds that of a run",
                                device_text(*missing), device_text(*found.holding)),
                    "Name the devices that the run was started with, or start a new run in other "
                    "directories.");
    }
    return open_all(options, space, sources);
  }
  // A user who restored a state wants that one, and not a run from the beginning in its place.
  if (found.copied_step != 0) {
    storage::StoreState copy;
    copy.copied_step = found.copied_step;
    return storage::interrupted_creation(copy).with_context(device_text(*found.begun.front()));
  }
  if (!options.create) {
    return Status(ErrorCode::kNotFound,
                  fmt::format("{} holds no optimizer state", device_text(*sources.front())),
                  "Check the path; a new run makes its state when it starts.");
  }
  for (DeviceSource* source : found.begun) {
    base::log(base::LogLevel::kWarning,
              fmt::format("{} holds an interrupted creation; starting over", device_text(*source)));
    SI_RETURN_IF_ERROR(source->erase());
  }
  SI_ASSIGN_OR_RETURN(DeviceSet set, create_devices(options, space, sources));
  std::vector<DeviceSource*> in_order;
  for (const auto& source : sources) in_order.push_back(source.get());
  SI_RETURN_IF_ERROR(cache_state(options, in_order, set));
  return set;
}

size_t DeviceSet::subgroup_at(uint64_t element) const {
  const auto after = std::upper_bound(
      subgroups.begin(), subgroups.end(), element,
      [](uint64_t value, const plan::Subgroup& subgroup) { return value < subgroup.first; });
  return static_cast<size_t>(after - subgroups.begin()) - 1;
}

}  // namespace smartinf::engine
