#include "smartinf/plan/slots.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>

#include "smartinf/base/units.h"

namespace smartinf::plan {

std::vector<uint64_t> slot_sizes(std::span<const uint64_t> units, uint32_t slots) {
  std::vector<uint64_t> sizes(std::min<size_t>(slots, units.size()));
  std::vector<uint64_t> neighbours(sizes.size());
  for (size_t first = 0; first < units.size(); ++first) {
    for (size_t i = 0; i < neighbours.size(); ++i) {
      neighbours[i] = units[(first + i) % units.size()];
    }
    std::ranges::sort(neighbours, std::greater());
    for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = std::max(sizes[i], neighbours[i]);
  }
  return sizes;
}

uint64_t slot_padding_elements(std::span<const Unit> units, uint64_t subgroup_elements) {
  uint64_t most = 0;
  for (const Unit& unit : units) {
    const uint64_t first = unit.first / subgroup_elements * subgroup_elements;
    const uint64_t end =
        std::min(base::round_up(unit.end(), subgroup_elements), units.back().end());
    most = std::max(most, end - first - unit.count);
  }
  return most;
}

uint64_t slot_elements(std::span<const Unit> units, uint32_t slots) {
  std::vector<uint64_t> counts;
  for (const Unit& unit : units) counts.push_back(unit.count);
  const std::vector<uint64_t> sizes = slot_sizes(counts, slots);
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
}

size_t next_use(const Uses& uses, uint32_t unit) {
  const auto from = uses.order.begin() + static_cast<std::ptrdiff_t>(uses.next);
  return static_cast<size_t>(std::find(from, uses.order.end(), unit) - uses.order.begin());
}

namespace {

/// Sizes of the next units behind a use, as many as there are other slots.
std::vector<uint64_t> sizes_behind(const Uses& uses, size_t use, uint32_t unit, size_t count) {
  std::vector<uint32_t> behind;
  for (; use < uses.order.size() && behind.size() < count; ++use) {
    const uint32_t other = uses.order[use];
    if (other != unit && std::ranges::find(behind, other) == behind.end()) behind.push_back(other);
  }
  std::vector<uint64_t> sizes;
  for (const uint32_t other : behind) sizes.push_back(uses.sizes[other]);
  return sizes;
}

/// Whether a unit in this slot leaves to the units behind what they need of the slots that are
/// larger than the smallest which it fits.
bool leaves_room(std::span<const Slot> slots, const Slot& taken, uint64_t size,
                 std::span<const uint64_t> behind) {
  return std::ranges::none_of(slots, [&](const Slot& smaller) {
    if (smaller.size < size || smaller.size >= taken.size) return false;
    const auto needed = std::ranges::count_if(
        behind, [&](uint64_t other) { return other > smaller.size; });
    const auto there = std::ranges::count_if(
        slots, [&](const Slot& other) { return other.size > smaller.size; });
    return needed > there - 1;
  });
}

}  // namespace

std::optional<uint32_t> choose_slot(std::span<const Slot> slots, const Uses& uses, uint32_t unit,
                                    std::optional<size_t> ahead) {
  const uint64_t size = uses.sizes[unit];
  const std::vector<uint64_t> behind =
      sizes_behind(uses, ahead.value_or(uses.next), unit, slots.size() - 1);
  std::optional<uint32_t> best;
  std::tuple<bool, size_t, uint64_t> best_key;
  for (uint32_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = slots[i];
    if (slot.held || slot.size < size) continue;
    const bool room = leaves_room(slots, slot, size, behind);
    const size_t use = slot.unit ? next_use(uses, *slot.unit) : uses.order.size() + 1;
    if (ahead && (!room || use <= *ahead)) continue;
    const std::tuple key(room, use, ~slot.size);
    if (best && key <= best_key) continue;
    best = i;
    best_key = key;
  }
  return best;
}

}  // namespace smartinf::plan
