#include "smartinf/plan/state_cache.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>

#include "smartinf/base/check.h"

namespace smartinf::plan {

std::vector<uint64_t> share_state_cache(std::span<const CachedDevice> devices,
                                        uint64_t budget_bytes, bool writes_too) {
  std::vector<uint64_t> cached(devices.size(), 0);
  const double saved = writes_too ? 2 : 1;
  const auto seconds = [&](size_t d) {
    const auto moved =
        2 * static_cast<double>(devices[d].subgroups) - saved * static_cast<double>(cached[d]);
    return moved * static_cast<double>(devices[d].subgroup_bytes) / devices[d].bandwidth;
  };
  // The slowest on top; among equals the first device.
  using Entry = std::pair<double, int64_t>;
  std::priority_queue<Entry> slowest;
  const auto push = [&](size_t d) { slowest.emplace(seconds(d), -static_cast<int64_t>(d)); };
  for (size_t d = 0; d < devices.size(); ++d) {
    SI_CHECK(std::isfinite(devices[d].bandwidth) && devices[d].bandwidth > 0,
             "a device's bandwidth is positive");
    if (devices[d].subgroups > 0 && devices[d].subgroup_bytes > 0) push(d);
  }
  uint64_t left = budget_bytes;
  while (!slowest.empty()) {
    const auto d = static_cast<size_t>(-slowest.top().second);
    slowest.pop();
    if (devices[d].subgroup_bytes > left) continue;  // another one's may be smaller
    left -= devices[d].subgroup_bytes;
    if (++cached[d] < devices[d].subgroups) push(d);
  }
  return cached;
}

}  // namespace smartinf::plan
