// What lies around some vertices of a graph: all within some hops, or a sample of it, and the rows
// that have to be there to compute with them. Graphs have every edge both ways.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/graph/csr.h"

namespace smartinf::graph {

/// Vertices by their distance from some, so that what lies within fewer hops is a prefix: what a
/// layer still needs, when its output is wanted for the first alone.
struct HopOrder {
  std::vector<Vertex> vertices;  // the seeds in their order, then each distance's, ascending
  std::vector<size_t> ends;      // [hops + 1]: how many are within 0, 1, ... hops
};

struct Sampling {
  uint32_t hops = 1;
  uint32_t fanout = 15;  // neighbours that a vertex brings in, at most
  uint64_t seed = 1;
};

/// Threads: one caller.
class Neighbourhood {
 public:
  /// csr outlives it.
  explicit Neighbourhood(const Csr& csr);

  /// All vertices within `hops` of the seeds, which are distinct.
  HopOrder within(std::span<const Vertex> seeds, uint32_t hops);
  /// Expansion-aware sampling (GraNNDis, PACT 2024): each vertex of a hop, in order, brings in
  /// those of its neighbours that lead to the most vertices which are not there yet; among equals
  /// the seed decides.
  HopOrder sample(std::span<const Vertex> seeds, const Sampling& sampling);
  /// The edges among some distinct vertices, which are numbered by their places.
  Csr induced(std::span<const Vertex> vertices);

 private:
  void add(Vertex v, HopOrder& order);
  void begin(std::span<const Vertex> seeds, HopOrder& order);
  void forget(std::span<const Vertex> vertices);

  const Csr& csr_;
  std::vector<bool> taken_;
  std::vector<uint32_t> places_;  // of induced()
};

/// Rows of a part of the vertices: its own, and its neighbours elsewhere.
struct PartRows {
  uint64_t own = 0;
  uint64_t halo = 0;
};
/// bounds: [parts + 1], ascending numbers that parts begin with.
std::vector<PartRows> part_rows(const Csr& csr, std::span<const Vertex> bounds);

}  // namespace smartinf::graph
