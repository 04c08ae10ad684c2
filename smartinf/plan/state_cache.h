// Which subgroups' state stays in host memory as well, so that a step reads less from the drives.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace smartinf::plan {

/// Traffic of one device in a step without a cache: every subgroup is read and written once.
struct CachedDevice {
  uint64_t subgroups = 0;
  uint64_t subgroup_bytes = 0;  // of state, and of memory that a cached one takes
  double bandwidth = 1;         // relative; bytes per second, read and written together
};

/// Subgroups of each device that stay in memory, at most budget_bytes of all together. A step takes
/// as long as its slowest device, so each next one goes to the device that takes longest so far;
/// when that one can save no more, the others follow. writes_too: cached ones are not written in a
/// step either (durability "none"). The same arguments give the same shares on every machine.
std::vector<uint64_t> share_state_cache(std::span<const CachedDevice> devices,
                                        uint64_t budget_bytes, bool writes_too);

/// Whether the subgroup at `position` of a device's order is among its `cached` ones of
/// `subgroups`. They are spread evenly, so that what is left to read stays beside what is written.
constexpr bool stays_in_memory(uint64_t position, uint64_t cached, uint64_t subgroups) {
  return (position + 1) * cached / subgroups > position * cached / subgroups;
}

}  // namespace smartinf::plan
