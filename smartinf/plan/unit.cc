#include "smartinf/plan/unit.h"

#include <algorithm>

namespace smartinf::plan {

std::vector<Unit> make_units(const ModelElements& model) {
  // A forward waits for a whole unit's weights, and a unit takes a slot: not too much at once.
  constexpr uint64_t kUnitsMin = 16;
  const uint64_t all = model.embedding + model.layers * model.layer + model.head;
  const uint64_t group = std::max<uint64_t>(1, all / kUnitsMin / model.layer);
  std::vector<Unit> units{{0, model.embedding, 0, 0}};
  for (uint32_t layer = 0; layer < model.layers;) {
    const auto layers = static_cast<uint32_t>(std::min<uint64_t>(group, model.layers - layer));
    units.push_back({units.back().end(), layers * model.layer, layer, layers});
    layer += layers;
  }
  units.push_back({units.back().end(), model.head, 0, 0});
  return units;
}

}  // namespace smartinf::plan
