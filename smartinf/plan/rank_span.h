// Elements of a model and the ranks that compute with them. Pure.
#pragma once

#include <cstdint>

namespace smartinf::plan {

/// Elements that only some ranks compute with: these.
struct RankSpan {
  uint64_t first = 0;
  uint64_t count = 0;
  uint32_t first_rank = 0;
  uint32_t ranks = 0;

  uint64_t end() const { return first + count; }
  bool has_rank(uint32_t rank) const { return rank >= first_rank && rank - first_rank < ranks; }
};

}  // namespace smartinf::plan
