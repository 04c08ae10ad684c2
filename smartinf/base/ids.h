// Indices that must not be mixed up are types of their own.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace smartinf::base {

template <typename Tag>
struct Id {
  uint32_t value = 0;
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using SubgroupId = Id<struct SubgroupTag>;  // position in the parameter space's list of subgroups
using DeviceId = Id<struct DeviceTag>;      // position in the recipe's list of devices
using SlotId = Id<struct SlotTag>;          // one set of a device's fixed buffers

/// Optimizer steps. 0 is the initial state; the first update makes step 1.
using StepNumber = uint64_t;

}  // namespace smartinf::base

template <typename Tag>
struct std::hash<smartinf::base::Id<Tag>> {
  size_t operator()(smartinf::base::Id<Tag> id) const noexcept { return id.value; }
};
