// Which device keeps a sequence's keys and values. A step reads all of them, and takes as long as
// the device that reads longest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace smartinf::plan {

struct CacheDevice {
  double bandwidth = 1;     // relative; bytes read per second
  uint64_t bytes_used = 0;  // by the sequences that it has
};

/// Devices in the order in which a sequence of so many bytes is offered to them: first the one that
/// will read what it has soonest. One that has no room passes it to the next. The same arguments
/// give the same order on every machine.
std::vector<size_t> cache_placement(std::span<const CacheDevice> devices, uint64_t bytes);

}  // namespace smartinf::plan
