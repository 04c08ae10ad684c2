#include "smartinf/plan/placement.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <ranges>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"

namespace smartinf::plan {

using base::DeviceId;
using base::ErrorCode;
using base::Status;

namespace {

constexpr uint32_t kNobody = ~uint32_t{0};

/// Elements each device should get: in proportion to bandwidth, with the surplus of full devices
/// shared out among the rest.
std::vector<double> shares(uint64_t elements, std::span<const DeviceCapacity> devices) {
  std::vector<double> share(devices.size(), 0);
  std::vector<bool> full(devices.size(), false);
  double left = static_cast<double>(elements);
  for (bool changed = true; changed;) {
    changed = false;
    double rate = 0;
    for (size_t d = 0; d < devices.size(); ++d) rate += full[d] ? 0 : devices[d].bandwidth;
    double taken = 0;
    for (size_t d = 0; d < devices.size(); ++d) {
      if (full[d]) continue;
      const double capacity = static_cast<double>(devices[d].elements_max);
      share[d] = left * devices[d].bandwidth / rate;
      if (share[d] <= capacity) continue;
      share[d] = capacity;
      taken += capacity;
      full[d] = true;
      changed = true;
    }
    left -= taken;
  }
  return share;
}

/// Gives every subgroup without an owner to the device that would reach its share last, in the
/// order of the space: that spreads each device's subgroups evenly. `quota[d]` bounds how many d
/// takes.
bool fill(std::span<const Subgroup> subgroups, std::span<const DeviceCapacity> devices,
          std::span<const double> share, std::span<const uint64_t> quota,
          std::vector<DeviceId>& owner) {
  std::vector<uint64_t> elements(devices.size(), 0);
  std::vector<uint64_t> taken(devices.size(), 0);
  for (size_t i = 0; i < subgroups.size(); ++i) {
    if (owner[i].value == kNobody) continue;
    elements[owner[i].value] += subgroups[i].count;
    ++taken[owner[i].value];
  }
  for (size_t i = 0; i < subgroups.size(); ++i) {
    if (owner[i].value != kNobody) continue;
    double best = std::numeric_limits<double>::infinity();
    for (uint32_t d = 0; d < devices.size(); ++d) {
      if (taken[d] >= quota[d] || share[d] <= 0 ||
          subgroups[i].count > devices[d].elements_max - elements[d]) {
        continue;
      }
      const double filled = static_cast<double>(elements[d] + subgroups[i].count) / share[d];
      if (filled < best) {
        best = filled;
        owner[i] = DeviceId{d};
      }
    }
    if (owner[i].value == kNobody) return false;
    elements[owner[i].value] += subgroups[i].count;
    ++taken[owner[i].value];
  }
  return true;
}

}  // namespace

base::Result<std::vector<DeviceId>> place(std::span<const Subgroup> subgroups,
                                          std::span<const DeviceCapacity> devices,
                                          std::span<const DeviceId> previous) {
  SI_CHECK(previous.empty() || previous.size() == subgroups.size(),
           "an earlier placement is of the same subgroups");
  if (devices.empty()) {
    return Status(ErrorCode::kInvalidArgument, "there is no device for the optimizer state",
                  "Name at least one device.");
  }
  uint64_t elements = 0;
  uint64_t subgroup_max = 0;
  for (const Subgroup& subgroup : subgroups) {
    elements += subgroup.count;
    subgroup_max = std::max(subgroup_max, subgroup.count);
  }
  // Only whole subgroups fit: a capacity is worth what is left after rounding down.
  std::vector<DeviceCapacity> usable(devices.begin(), devices.end());
  uint64_t capacity = 0;
  for (size_t d = 0; d < usable.size(); ++d) {
    if (!std::isfinite(usable[d].bandwidth) || usable[d].bandwidth <= 0) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("device {} has bandwidth {}", d, usable[d].bandwidth),
                    "Give a positive number, or 0 to have it measured.");
    }
    usable[d].elements_max = std::min(usable[d].elements_max, elements);
    capacity += std::min(usable[d].elements_max, elements - std::min(capacity, elements));
  }
  const auto no_space = [&] {
    return Status(ErrorCode::kNoSpace,
                  fmt::format("the devices have room for {} of {} parameters, in subgroups of {}",
                              capacity, elements, subgroup_max),
                  "Add a device, free space on one, or use smaller subgroups.");
  };
  if (capacity < elements) return no_space();

  const std::vector<double> share = shares(elements, usable);
  const std::vector<uint64_t> unbounded(devices.size(), ~uint64_t{0});
  std::vector<DeviceId> fresh(subgroups.size(), DeviceId{kNobody});
  if (!fill(subgroups, usable, share, unbounded, fresh)) return no_space();
  if (previous.empty()) return fresh;

  std::vector<uint64_t> quota(devices.size(), 0);
  for (const DeviceId owner : fresh) ++quota[owner.value];
  std::vector<DeviceId> owner(previous.begin(), previous.end());
  std::vector<uint64_t> held(devices.size(), 0);
  for (DeviceId& device : owner) {
    if (device.value >= devices.size()) {
      device.value = kNobody;
    } else {
      ++held[device.value];
    }
  }
  // A device above its quota keeps evenly spaced subgroups, so that what it keeps stays spread.
  std::vector<uint64_t> seen(devices.size(), 0);
  for (DeviceId& device : owner) {
    const uint32_t d = device.value;
    if (d == kNobody || held[d] <= quota[d]) continue;
    const uint64_t position = seen[d]++;
    const bool kept = (position + 1) * quota[d] / held[d] > position * quota[d] / held[d];
    if (!kept) device.value = kNobody;
  }
  // The shorter last subgroup can make counted quotas miss a tight capacity; then start afresh.
  if (!fill(subgroups, usable, share, quota, owner)) return fresh;
  std::vector<uint64_t> load(devices.size(), 0);
  for (size_t i = 0; i < owner.size(); ++i) load[owner[i].value] += subgroups[i].count;
  for (size_t d = 0; d < devices.size(); ++d) {
    if (load[d] > usable[d].elements_max) return fresh;
  }
  return owner;
}

std::vector<Subgroup> cut_by_stage(std::span<const Subgroup> subgroups,
                                   std::span<const RankSpan> stages) {
  std::set<uint64_t> cuts;
  for (const RankSpan& span : stages) {
    for (const uint64_t edge : {span.first, span.end()}) {
      cuts.insert(edge / base::kBlockElements * base::kBlockElements);
      cuts.insert(base::round_up(edge, base::kBlockElements));
    }
  }
  std::vector<Subgroup> made;
  for (const Subgroup& subgroup : subgroups) {
    uint64_t first = subgroup.first;
    const uint64_t end = first + subgroup.count;
    while (first < end) {
      const auto next = cuts.upper_bound(first);
      const uint64_t behind = next == cuts.end() ? end : std::min(end, *next);
      made.push_back({base::SubgroupId{static_cast<uint32_t>(made.size())}, first, behind - first});
      first = behind;
    }
  }
  return made;
}

base::Result<std::vector<DeviceId>> place_by_stage(std::span<const Subgroup> subgroups,
                                                   std::span<const DeviceCapacity> devices,
                                                   std::span<const RankSpan> stages) {
  // Of spans that have as much of a subgroup the last one gets it: the tied head's comes first.
  std::map<uint32_t, std::pair<RankSpan, std::vector<size_t>>> numbers;  // by first rank
  for (size_t i = 0; i < subgroups.size(); ++i) {
    const auto elements = [&](const RankSpan& span) {
      const uint64_t first = std::max(subgroups[i].first, span.first);
      const uint64_t end = std::min(subgroups[i].first + subgroups[i].count, span.end());
      return end - std::min(first, end);
    };
    const auto reversed = std::views::reverse(stages);
    const auto most = std::ranges::max_element(reversed, {}, elements);
    if (most == reversed.end() || elements(*most) == 0) continue;
    auto& [ranks, of_ranks] = numbers[most->first_rank];
    ranks = *most;
    of_ranks.push_back(i);
  }
  std::vector<DeviceId> owner(subgroups.size(), DeviceId{kNobody});
  for (const auto& [first_rank, one] : numbers) {
    const auto& [ranks, of_ranks] = one;
    std::vector<Subgroup> mine;
    for (const size_t i : of_ranks) mine.push_back(subgroups[i]);
    std::vector<DeviceCapacity> own;
    std::vector<uint32_t> own_numbers;
    for (uint32_t d = 0; d < devices.size(); ++d) {
      if (!ranks.has_rank(devices[d].rank)) continue;
      own.push_back(devices[d]);
      own_numbers.push_back(d);
    }
    SI_ASSIGN_OR_RETURN(const std::vector<DeviceId> placed, place(mine, own));
    for (size_t i = 0; i < of_ranks.size(); ++i) {
      owner[of_ranks[i]] = DeviceId{own_numbers[placed[i].value]};
    }
  }
  return owner;
}

}  // namespace smartinf::plan
