// Cutting a graph into blocks of vertices with few edges between them. Vertices are then numbered
// block by block, so that a block is a range of rows.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/status.h"
#include "smartinf/graph/csr.h"

namespace smartinf::graph {

enum class PartitionMethod : uint8_t {
  kStream,  // one pass over the vertices, and some that move them
  kMetis,   // Karypis and Kumar 1998; where the library was there when this was built
};
inline constexpr std::array<std::string_view, 2> kPartitionMethodNames{"stream", "metis"};
constexpr base::EnumNames enum_names(PartitionMethod) { return kPartitionMethodNames; }

bool has_metis();

/// The block of each vertex, in [0, blocks). Graphs of both functions have every edge both ways.
/// The same arguments give the same blocks on every machine with the same METIS. A block has at
/// most 1/32 more vertices than the mean (kMetis: about so).
/// Errors: kInvalidArgument, no block or more blocks than vertices; kUnsupported, kMetis without
/// the library, or with more edges than it numbers.
/// Source of kStream: Stanton and Kliot 2012 (linear deterministic greedy), breadth first, or blocks
/// of the vertices as they are numbered where these cut fewer edges; then passes in which each
/// vertex moves to the block that has most of its neighbours.
base::Result<std::vector<uint32_t>> partition(const Csr& csr, uint32_t blocks,
                                              PartitionMethod method);

/// Edges between blocks, each counted in both directions.
uint64_t cut_edges(const Csr& csr, std::span<const uint32_t> block_of);

/// Vertices block by block. A block follows the one before it that it has most edges with all of,
/// so that neighbouring blocks, taken together, have few edges to others as well. Within a block
/// first come vertices without edges to other blocks, then the others by the first two blocks that
/// they have edges to: rows of a block that another one needs lie together.
struct BlockOrder {
  std::vector<Vertex> order;  // [vertices]: the vertex that gets each number
  std::vector<Vertex> first;  // [blocks + 1]: the number that each block begins with
};
BlockOrder order_blocks(const Csr& csr, std::span<const uint32_t> block_of, uint32_t blocks);

/// The graph with vertex order[i] as vertex i.
Csr renumbered(const Csr& csr, std::span<const Vertex> order);

/// The other way round: at order[i] stands i.
std::vector<Vertex> inverse(std::span<const Vertex> order);

}  // namespace smartinf::graph
