#include "smartinf/graph/metis.h"

#include <limits>

#include <fmt/format.h>
#include <metis.h>

#include "smartinf/graph/partition.h"

namespace smartinf::graph {

bool has_metis() { return true; }

base::Result<std::vector<uint32_t>> metis_partition(const Csr& csr, uint32_t blocks) {
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<idx_t>::max());
  if (csr.edges() > kMost) {
    return base::Status(
        base::ErrorCode::kUnsupported,
        fmt::format("METIS numbers {} edges, and the graph has {}", kMost, csr.edges()),
        "Use the method stream.");
  }
  std::vector<idx_t> first(csr.vertices() + size_t{1});
  std::vector<idx_t> neighbours;
  neighbours.reserve(csr.edges());
  for (Vertex v = 0; v < csr.vertices(); ++v) {
    for (const Vertex to : csr.neighbours(v)) {
      if (to != v) neighbours.push_back(static_cast<idx_t>(to));
    }
    first[v + size_t{1}] = static_cast<idx_t>(neighbours.size());
  }
  idx_t options[METIS_NOPTIONS];
  METIS_SetDefaultOptions(options);
  options[METIS_OPTION_SEED] = 1;
  options[METIS_OPTION_UFACTOR] = 30;  // blocks of up to 1.03 times the mean
  idx_t vertices = static_cast<idx_t>(csr.vertices());
  idx_t constraints = 1;
  idx_t parts = static_cast<idx_t>(blocks);
  idx_t cut = 0;
  std::vector<idx_t> part(csr.vertices());
  const int outcome =
      METIS_PartGraphKway(&vertices, &constraints, first.data(), neighbours.data(), nullptr,
                          nullptr, nullptr, &parts, nullptr, nullptr, options, &cut, part.data());
  if (outcome != METIS_OK) {
    return base::Status(
        outcome == METIS_ERROR_MEMORY ? base::ErrorCode::kOutOfMemory : base::ErrorCode::kIo,
        fmt::format("METIS failed with its code {}", outcome), "Use the method stream.");
  }
  return std::vector<uint32_t>(part.begin(), part.end());
}

}  // namespace smartinf::graph
