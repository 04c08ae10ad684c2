// Units: what forward and backward take one after another. A unit is the embedding, a group of
// whole layers, or the final norm with the head.
#pragma once

#include <cstdint>

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

}  // namespace smartinf::plan
