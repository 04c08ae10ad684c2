#include "smartinf/train/packing.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "smartinf/base/check.h"

namespace smartinf::train {

std::vector<uint64_t> pack(std::span<const uint32_t> lengths, uint32_t room) {
  std::vector<uint64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [&](uint64_t piece) { return lengths[piece]; });
  std::vector<uint64_t> window_of(lengths.size());
  std::map<uint32_t, std::vector<uint64_t>> open;  // windows by what room they have left, above 0
  uint64_t windows = 0;
  for (const uint64_t piece : order) {
    const uint32_t length = lengths[piece];
    SI_CHECK(length > 0 && length <= room, "a piece that no window holds");
    uint64_t window = windows;
    uint32_t left = room;
    if (const auto best = open.lower_bound(length); best != open.end()) {
      left = best->first;
      window = best->second.back();
      best->second.pop_back();
      if (best->second.empty()) open.erase(best);
    } else {
      ++windows;
    }
    window_of[piece] = window;
    if (left > length) open[left - length].push_back(window);
  }
  return window_of;
}

}  // namespace smartinf::train
