// Slots that units pass through: how large they are, and which of them a unit takes. A model's
// embedding is often several times as large as a layer, and only one slot has to hold it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "smartinf/plan/unit.h"

namespace smartinf::plan {

/// Sizes of slots, largest first, in which any `slots` units that are next to each other in the
/// order of use have room at once, in one each: the j-th is the largest j-th largest of such
/// neighbours. units: their sizes; they are used one after another, forwards and backwards, the
/// first again behind the last. Not more slots than units. Pure.
std::vector<uint64_t> slot_sizes(std::span<const uint64_t> units, uint32_t slots);

/// Elements of all slots together. Pure.
uint64_t slot_elements(std::span<const Unit> units, uint32_t slots);

/// Elements by which the subgroups of a unit, of so many elements each, go beyond it, at most.
/// Pure.
uint64_t slot_padding_elements(std::span<const Unit> units, uint64_t subgroup_elements);

/// A slot as the choice sees it.
struct Slot {
  uint64_t size = 0;
  std::optional<uint32_t> unit = std::nullopt;
  bool held = false;
};

/// Units' uses to come: order[next] is the next one.
struct Uses {
  std::span<const uint32_t> order;
  size_t next = 0;
  std::span<const uint64_t> sizes;  // by unit
};

/// Where in the order a unit is used next; the order's end: never. Pure.
size_t next_use(const Uses& uses, uint32_t unit);

/// The slot for a unit: one that is large enough and not held, whose own unit is used last of all,
/// and of equal ones the smallest. A slot larger than need be is taken where the units behind still
/// have theirs, or else when there is no other. ahead: where in the order the unit is used, if it
/// is only read ahead, which takes no slot from a unit that is used before, nor one that the units
/// behind need. None: there is no such slot. Pure.
std::optional<uint32_t> choose_slot(std::span<const Slot> slots, const Uses& uses, uint32_t unit,
                                    std::optional<size_t> ahead = std::nullopt);

}  // namespace smartinf::plan
