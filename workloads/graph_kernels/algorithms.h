// PageRank, breadth-first search, connected components and shortest paths. Each tells a `Machine`
// what it reads and writes:
//
//   stream(bytes)        read one after another          store(bytes)  written so
//   list(first, bytes)   a vertex's edges, read from a byte of all edges on
//   read(vertex), write(vertex)                          its value of 8 bytes, at a random place
//
// Results do not depend on the machine; NoMachine is none.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "smartinf/graph/csr.h"

namespace smartinf::workloads {

using graph::Csr;
using graph::Vertex;

struct NoMachine {
  void stream(uint64_t) {}
  void store(uint64_t) {}
  void list(uint64_t, uint64_t) {}
  void read(Vertex) {}
  void write(Vertex) {}
};

inline constexpr uint64_t kVertexBytes = 4;  // of an edge's end, and of a vertex in a frontier
inline constexpr uint64_t kValueBytes = 8;
inline constexpr uint32_t kNotReached = std::numeric_limits<uint32_t>::max();

/// Ranks that add up to 1, after so many iterations. Each vertex pulls from those that point to
/// it; what vertices without edges hold goes to all alike. Source: Page and others 1999.
template <typename Machine>
std::vector<double> pagerank(const Csr& csr, uint32_t iterations, Machine& machine,
                             double damping = 0.85) {
  const Csr pull = csr.reversed();
  const auto n = static_cast<double>(csr.vertices());
  std::vector<double> rank(csr.vertices(), 1 / n);
  std::vector<double> given(csr.vertices());
  for (uint32_t i = 0; i < iterations; ++i) {
    double lost = 0;
    for (Vertex v = 0; v < csr.vertices(); ++v) {
      if (csr.degree(v) == 0) lost += rank[v];
      given[v] = csr.degree(v) == 0 ? 0 : rank[v] / static_cast<double>(csr.degree(v));
    }
    for (Vertex v = 0; v < csr.vertices(); ++v) {
      machine.stream(kValueBytes);  // where its edges begin
      double sum = 0;
      for (const Vertex from : pull.neighbours(v)) {
        machine.stream(kVertexBytes);
        machine.read(from);
        sum += given[from];
      }
      rank[v] = (1 - damping) / n + damping * (sum + lost / n);
      machine.store(kValueBytes);
    }
  }
  return rank;
}

/// Vertices that a step reached, each with its edges: f(vertex, neighbour) for all of them.
template <typename Machine, typename Visit>
void for_each_edge(const Csr& csr, const std::vector<Vertex>& frontier, uint64_t edge_bytes,
                   Machine& machine, const Visit& visit) {
  for (const Vertex v : frontier) {
    machine.stream(kVertexBytes);
    machine.read(v);
    machine.list(csr.first(v) * edge_bytes, csr.degree(v) * edge_bytes);
    for (const Vertex to : csr.neighbours(v)) {
      machine.read(to);
      visit(v, to);
    }
  }
}

/// Edges between `source` and each vertex; kNotReached where there is no path.
template <typename Machine>
std::vector<uint32_t> breadth_first(const Csr& csr, Vertex source, Machine& machine) {
  std::vector<uint32_t> depth(csr.vertices(), kNotReached);
  std::vector<Vertex> frontier{source};
  depth[source] = 0;
  for (uint32_t level = 1; !frontier.empty(); ++level) {
    std::vector<Vertex> next;
    for_each_edge(csr, frontier, kVertexBytes, machine, [&](Vertex, Vertex to) {
      if (depth[to] != kNotReached) return;
      depth[to] = level;
      machine.write(to);
      machine.store(kVertexBytes);
      next.push_back(to);
    });
    frontier = std::move(next);
  }
  return depth;
}

/// Takes edges of vertices that have changed until none changes any more. lowers(vertex,
/// neighbour): whether that changes the neighbour.
template <typename Machine, typename Lowers>
void relax(const Csr& csr, std::vector<Vertex> frontier, uint64_t edge_bytes, Machine& machine,
           const Lowers& lowers) {
  std::vector<bool> waits(csr.vertices(), false);
  while (!frontier.empty()) {
    std::vector<Vertex> next;
    for_each_edge(csr, frontier, edge_bytes, machine, [&](Vertex v, Vertex to) {
      if (!lowers(v, to)) return;
      machine.write(to);
      if (waits[to]) return;
      waits[to] = true;
      machine.store(kVertexBytes);
      next.push_back(to);
    });
    for (const Vertex v : next) waits[v] = false;
    frontier = std::move(next);
  }
}

/// For each vertex the smallest one of those that it is connected with, whichever way edges go.
template <typename Machine>
std::vector<Vertex> components(const Csr& csr, Machine& machine) {
  const Csr both = csr.both_ways();
  std::vector<Vertex> label(csr.vertices());
  std::iota(label.begin(), label.end(), Vertex{0});
  relax(both, label, kVertexBytes, machine, [&](Vertex v, Vertex to) {
    if (label[v] >= label[to]) return false;
    label[to] = label[v];
    return true;
  });
  return label;
}

/// An edge's length, 1 to 255, from its ends.
inline uint32_t edge_length(Vertex from, Vertex to) {
  const uint64_t mixed = (uint64_t{from} << 32 | to) * 0x9E3779B97F4A7C15u;
  return 1 + static_cast<uint32_t>((mixed >> 40) % 255);
}

/// Lengths of the shortest paths from `source`, or kNotReached. Source: Bellman 1958, of vertices
/// that have changed.
template <typename Machine>
std::vector<uint32_t> shortest_paths(const Csr& csr, Vertex source, Machine& machine) {
  std::vector<uint32_t> distance(csr.vertices(), kNotReached);
  distance[source] = 0;
  relax(csr, {source}, 2 * kVertexBytes, machine, [&](Vertex v, Vertex to) {
    const uint32_t through = distance[v] + edge_length(v, to);
    if (through >= distance[to]) return false;
    distance[to] = through;
    return true;
  });
  return distance;
}

}  // namespace smartinf::workloads
