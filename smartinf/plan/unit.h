// Units: what forward and backward take one after another. A unit is the embedding, a group of
// whole layers, or the final norm with the head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace smartinf::plan {

/// Elements [first, first + count) of the parameter space. Units of a model follow each other
/// without gaps.
struct Unit {
  uint64_t first = 0;
  uint64_t count = 0;
  uint32_t first_layer = 0;
  uint32_t layers = 0;  // 0: the embedding or the head

  uint64_t end() const { return first + count; }
};

/// Elements of a model's parts, in the order of the parameter space.
struct ModelElements {
  uint64_t embedding = 0;
  uint64_t layer = 0;  // of each, at least 1
  uint32_t layers = 0;
  uint64_t head = 0;  // the final norm and, where it is not the embedding, the head
};

/// The units of a model in the order of the forward: the embedding, groups of whole layers, the
/// final norm with the head. A group has at most a sixteenth of the elements, or one layer. Pure.
std::vector<Unit> make_units(const ModelElements& model);

/// Elements of the first `count` units.
inline uint64_t elements_of(std::span<const Unit> units, uint32_t count) {
  return count == 0 ? 0 : units[count - 1].end();
}

/// Where the weights of units stay between uses: the first ones on the accelerator, those behind
/// them in the host's memory, the rest on the devices. Without an accelerator the model computes in
/// the host's memory, and the first two are one.
struct UnitPlacement {
  uint32_t on_accelerator = 0;     // units
  uint32_t in_memory = 0;          // units, with those on the accelerator
  uint32_t host_slots = 0;         // for units that come from the devices
  uint32_t accelerator_slots = 0;  // for units that are not on the accelerator
};

}  // namespace smartinf::plan
