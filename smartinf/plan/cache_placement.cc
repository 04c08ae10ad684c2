#include "smartinf/plan/cache_placement.h"

#include <algorithm>
#include <numeric>

namespace smartinf::plan {

std::vector<size_t> cache_placement(std::span<const CacheDevice> devices, uint64_t bytes) {
  std::vector<size_t> order(devices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto seconds = [&](size_t device) {
    return static_cast<double>(devices[device].bytes_used + bytes) / devices[device].bandwidth;
  };
  std::ranges::stable_sort(order, {}, seconds);
  return order;
}

}  // namespace smartinf::plan
