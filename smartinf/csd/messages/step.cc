#include "smartinf/csd/messages/step.h"

#include <string>
#include <unordered_set>

#include <fmt/format.h>

#include "smartinf/csd/device_space.h"

namespace smartinf::csd {
namespace {

using base::ErrorCode;
using base::Status;

constexpr size_t kGroupsMax = size_t{1} << 16;

Status refused(std::string what) { return Status(ErrorCode::kInvalidArgument, std::move(what)); }

/// [first, first + count) of a subgroup. what: "gradient elements".
Status check_range(const DeviceSpace& space, base::SubgroupId id, uint64_t first, uint64_t count,
                   const char* what) {
  const storage::StoredSubgroup* subgroup = space.find(id);
  if (subgroup == nullptr) return of_another_device(id);
  if (first <= subgroup->count && count <= subgroup->count - first) return Status();
  return refused(fmt::format("{} {} and {} following of subgroup {}, which has {}", what, first,
                             count, id.value, subgroup->count));
}

/// A pointer to a plane that the device does not keep.
template <typename Planes>
bool beyond(const Planes& planes, const DeviceSpace& space) {
  for (size_t plane = space.layout().planes.size(); plane < planes.size(); ++plane) {
    if (planes[plane] != nullptr) return true;
  }
  return false;
}

}  // namespace

Status check(const Prefetch& message, const DeviceSpace& space) {
  if (message.subgroups.size() <= space.layout().subgroups.size()) return Status();
  return refused("more subgroups than the device has");
}

Status check(const PutGradient& message, const DeviceSpace& space) {
  return check_range(space, message.subgroup, message.first, message.count, "gradient elements");
}

Status check(const PutCompressedGradient& message, const DeviceSpace& space) {
  return space.find(message.subgroup) == nullptr ? of_another_device(message.subgroup) : Status();
}

Status check(const Update& message, const DeviceSpace& space) {
  if (message.scalars.size() < space.groups() || message.scalars.size() > kGroupsMax) {
    return refused(fmt::format("an update for {} of {} parameter groups", message.scalars.size(),
                               space.groups()));
  }
  const kernels::UpdateRule rule = message.scalars.front().rule;
  for (const kernels::StepScalars& scalars : message.scalars) {
    if (scalars.rule != rule) return refused("an update by more than one rule");
  }
  const bool samples_known =
      !space.matrices().empty() && kernels::takes_factored_second_moment(rule);
  std::unordered_set<base::SubgroupId> once;
  for (const SubgroupUpdate& entry : message.updates) {
    if (!once.insert(entry.subgroup).second) {
      return refused(fmt::format("an update of subgroup {} twice", entry.subgroup.value));
    }
    if (space.find(entry.subgroup) == nullptr) return of_another_device(entry.subgroup);
    if (entry.samples_out != nullptr && !samples_known) {
      return refused(
          "samples of variances, of a device that knows no matrices or of a rule "
          "without them");
    }
  }
  return Status();
}

Status check(const ReadState& message, const DeviceSpace& space) {
  if (beyond(message.planes, space)) return refused("a plane that the device does not keep");
  return check_range(space, message.subgroup, message.first, message.count, "state elements");
}

Status check(const WriteState& message, const DeviceSpace& space) {
  const storage::StoredSubgroup* subgroup = space.find(message.subgroup);
  if (subgroup == nullptr) return of_another_device(message.subgroup);
  if (message.count != subgroup->count) {
    return refused(fmt::format("state of {} elements for subgroup {}, which has {}", message.count,
                               message.subgroup.value, subgroup->count));
  }
  const bool residual = space.layout().planes.back() == base::PlaneKind::kResidual;
  if (beyond(message.planes, space) || (message.residual != nullptr && !residual)) {
    return refused("a plane that the device does not keep");
  }
  return Status();
}

Status check(const Prepare& message, const DeviceSpace&) {
  constexpr size_t kMax = storage::Store::kClientMetadataBytesMax;
  if (message.client_metadata.size() <= kMax) return Status();
  return refused(
      fmt::format("{} bytes of metadata where {} may come", message.client_metadata.size(), kMax));
}

}  // namespace smartinf::csd
