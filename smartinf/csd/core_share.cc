#include "smartinf/csd/core_pinning.h"

namespace smartinf::csd {

std::vector<uint32_t> CoreShare::take(std::span<const uint32_t> near, uint32_t threads) {
  std::vector<uint32_t> mine;
  for (const uint32_t core : near) {
    if (mine.size() < threads && !taken_.contains(core)) mine.push_back(core);
  }
  if (mine.size() < threads) return {};
  taken_.insert(mine.begin(), mine.end());
  return mine;
}

}  // namespace smartinf::csd
