#include "smartinf/graph/csr.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

namespace smartinf::graph {

using base::ErrorCode;
using base::Result;
using base::Status;

/// each_edge(f) calls f(from, to) for every edge, the same twice.
template <typename EachEdge>
Csr Csr::from_edges(uint64_t vertices, const EachEdge& each_edge) {
  Csr csr;
  csr.first_.assign(vertices + 1, 0);
  each_edge([&](Vertex from, Vertex) { ++csr.first_[from + size_t{1}]; });
  for (uint64_t v = 0; v < vertices; ++v) csr.first_[v + 1] += csr.first_[v];
  csr.neighbours_.resize(csr.first_.back());
  std::vector<uint64_t> next(csr.first_.begin(), csr.first_.end() - 1);
  each_edge([&](Vertex from, Vertex to) { csr.neighbours_[next[from]++] = to; });
  for (uint64_t v = 0; v < vertices; ++v) {
    std::sort(csr.neighbours_.begin() + static_cast<int64_t>(csr.first_[v]),
              csr.neighbours_.begin() + static_cast<int64_t>(csr.first_[v + 1]));
  }
  return csr;
}

Result<Csr> Csr::make(uint64_t vertices, std::span<const Edge> edges) {
  constexpr uint64_t kMost = std::numeric_limits<Vertex>::max();
  if (vertices > kMost) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} vertices are more than {}", vertices, kMost));
  }
  for (size_t i = 0; i < edges.size(); ++i) {
    const Vertex beyond = std::max(edges[i].from, edges[i].to);
    if (beyond < vertices) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("edge {} ({} to {}) names vertex {}, but there are {}", i,
                              edges[i].from, edges[i].to, beyond, vertices),
                  "Vertices are numbered from 0.");
  }
  return from_edges(vertices, [&](const auto& f) {
    for (const Edge& edge : edges) f(edge.from, edge.to);
  });
}

Csr Csr::reversed() const {
  return from_edges(vertices(), [&](const auto& f) {
    for (Vertex v = 0; v < vertices(); ++v) {
      for (const Vertex to : neighbours(v)) f(to, v);
    }
  });
}

Csr Csr::both_ways() const {
  return from_edges(vertices(), [&](const auto& f) {
    for (Vertex v = 0; v < vertices(); ++v) {
      for (const Vertex to : neighbours(v)) {
        f(v, to);
        f(to, v);
      }
    }
  });
}

}  // namespace smartinf::graph
