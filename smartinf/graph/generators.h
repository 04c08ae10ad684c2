// Random graphs. The same arguments give the same edges on every machine.
#pragma once

#include "smartinf/graph/csr.h"

namespace smartinf::graph {

/// Chances that an edge falls into a quarter of the matrix; d is what they leave.
struct RmatShares {
  double a = 0.57, b = 0.19, c = 0.19;
};

/// Recursive matrix: each bit of both ends is drawn by the quarters' chances; ends beyond the
/// last vertex are drawn again. `vertices` 1 to 2^32 - 1.
/// Source: Chakrabarti, Zhan and Faloutsos 2004; shares of Graph500.
std::vector<Edge> rmat_edges(uint64_t vertices, uint64_t edges, uint64_t seed,
                             const RmatShares& shares = {});

/// Both ends drawn from all vertices alike.
std::vector<Edge> uniform_edges(uint64_t vertices, uint64_t edges, uint64_t seed);

/// Blocks of neighbouring vertices, as equal as they come; with chance `inside` an edge's other end
/// is of the same block, else of all. Source: Holland, Laskey and Leinhardt 1983.
std::vector<Edge> block_edges(uint64_t vertices, uint64_t edges, uint64_t blocks, double inside,
                              uint64_t seed);

}  // namespace smartinf::graph
