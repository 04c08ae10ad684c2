#include "smartinf/plan/stages.h"

#include <algorithm>
#include <limits>

#include "smartinf/base/check.h"

namespace smartinf::plan {

uint32_t Stages::of_unit(uint32_t unit) const {
  const auto behind = std::upper_bound(begin.begin(), begin.end() - 1, unit);
  return static_cast<uint32_t>(behind - begin.begin()) - 1;
}

std::vector<uint32_t> split_units(uint32_t units, uint32_t stages,
                                  const std::function<double(uint32_t, uint32_t)>& cost) {
  SI_CHECK(stages > 0 && units >= stages, "a stage without a unit");
  constexpr double kNone = std::numeric_limits<double>::infinity();
  // Of the first `end` units in so many stages: the largest cost, and where the last one begins.
  struct Best {
    double cost = kNone;
    uint32_t begin = 0;
  };
  std::vector<std::vector<Best>> best(stages + 1, std::vector<Best>(units + 1));
  best[0][0].cost = 0;
  for (uint32_t stage = 1; stage <= stages; ++stage) {
    for (uint32_t end = stage; end <= units; ++end) {
      for (uint32_t begin = stage - 1; begin < end; ++begin) {
        const double most = std::max(best[stage - 1][begin].cost, cost(begin, end));
        if (most < best[stage][end].cost) best[stage][end] = {most, begin};
      }
    }
  }
  std::vector<uint32_t> begins(stages + 1, units);
  for (uint32_t stage = stages; stage > 0; --stage) {
    begins[stage - 1] = best[stage][begins[stage]].begin;
  }
  return begins;
}

double unit_cost(const StageCosts& model, uint32_t unit) {
  const Unit& one = model.units[unit];
  if (unit == 0) return 0;
  if (unit + 1 == model.units.size()) return static_cast<double>(model.head_matrix);
  return static_cast<double>(one.count + one.layers * model.sequence * model.width);
}

std::vector<uint32_t> Pipeline::units(bool tied) const {
  std::vector<uint32_t> units;
  if (tied && last() && begin() > 0) units.push_back(0);
  for (uint32_t unit = begin(); unit < end(); ++unit) units.push_back(unit);
  return units;
}

std::vector<RankSpan> rank_spans(const Stages& stages, std::span<const Unit> units, uint64_t tied) {
  std::vector<RankSpan> spans;
  const uint32_t count = stages.count();
  if (tied > 0 && count > 1) {
    spans.push_back({0, tied, (count - 1) * stages.replicas, stages.replicas});
  }
  for (uint32_t stage = 0; stage < count; ++stage) {
    const uint64_t first = units[stages.begin[stage]].first;
    const uint64_t end = units[stages.begin[stage + 1] - 1].end();
    spans.push_back({first, end - first, stage * stages.replicas, stages.replicas});
  }
  return spans;
}

}  // namespace smartinf::plan
