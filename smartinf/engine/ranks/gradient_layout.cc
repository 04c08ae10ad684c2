#include "smartinf/engine/ranks/gradient_layout.h"

#include <algorithm>

#include "smartinf/base/check.h"

namespace smartinf::engine {

SumFormat SumFormat::make(uint64_t micro_batches, base::DataType type, uint32_t world,
                          std::span<const Holders> trees) {
  SumFormat format;
  format.bytes.assign(world, 0);
  format.replicated = std::ranges::all_of(trees, [](const Holders& of) { return of.count > 1; });
  for (size_t tree = 0; tree < trees.size(); ++tree) {
    const size_t below = tree > 0 ? 1 : 0;  // the sum of the trees before
    format.last_stage = std::max(format.last_stage, trees[tree].first / trees[tree].count);
    plan::MicroBatchSum sum(micro_batches);
    for (uint32_t holder = 0; holder < trees[tree].count; ++holder) {
      const uint32_t rank = trees[tree].first + holder;
      const auto range = plan::micro_batches_of(micro_batches, holder, trees[tree].count);
      for (const plan::MicroBatchRange& node : plan::summation_nodes(micro_batches, range)) {
        const base::DataType node_type = node.size() == 1 ? type : base::DataType::kF32;
        format.stack_max = std::max(format.stack_max, below + sum.sums().size() + 1);
        format.nodes.push_back({rank, node_type, sum.push(node)});
        format.bytes[rank] += base::data_type_bytes(node_type);
        format.bytes_of_all += base::data_type_bytes(node_type);
      }
    }
    SI_CHECK(sum.sums().size() == 1, "micro batches that are not added up");
    if (below > 0) ++format.nodes.back().added;
  }
  const uint32_t one = format.nodes.front().rank;
  if (format.nodes_of(one) == format.nodes.size()) format.only = one;
  format.bytes_max = *std::max_element(format.bytes.begin(), format.bytes.end());
  return format;
}

uint64_t SumFormat::part_bytes(uint32_t rank, uint64_t count) const {
  uint64_t bytes_of_part = 0;
  for (const Node& node : nodes) {
    if (node.rank == rank) bytes_of_part += array_bytes(node.type, count);
  }
  return bytes_of_part;
}

const SumFormat& SumFormats::of(uint64_t micro_batches, base::DataType type,
                                std::vector<Holders> trees) {
  auto& format = formats_[{micro_batches, type, trees}];
  if (format == nullptr) {
    format = std::make_unique<SumFormat>(SumFormat::make(micro_batches, type, world_, trees));
  }
  return *format;
}

}  // namespace smartinf::engine
