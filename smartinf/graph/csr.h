// A directed graph in memory, as compressed rows: the neighbours of each vertex one after another.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::graph {

using Vertex = uint32_t;

struct Edge {
  Vertex from = 0;
  Vertex to = 0;

  bool operator==(const Edge&) const = default;
};

/// Edges of lines of two numbers, "from to", with spaces or a comma between them; lines that begin
/// with # are comments. path: for errors. Errors: kInvalidArgument with the line.
base::Result<std::vector<Edge>> edges_of_text(std::string_view text, const std::string& path);
/// One more than the highest vertex of an edge; 0 without edges.
uint64_t vertices_of(std::span<const Edge> edges);

class Csr {
 public:
  /// Edges keep their number: an edge that is there twice counts twice. Neighbours of a vertex
  /// rise. Errors: kInvalidArgument naming the first edge with a vertex that is not there.
  static base::Result<Csr> make(uint64_t vertices, std::span<const Edge> edges);

  /// first: [vertices + 1], where each vertex's neighbours begin; of each vertex they rise. Errors:
  /// kCorrupt for what is no graph, with the first place that is wrong.
  static base::Result<Csr> of_rows(std::vector<uint64_t> first, std::vector<Vertex> neighbours);

  Vertex vertices() const { return static_cast<Vertex>(first_.size() - 1); }
  uint64_t edges() const { return neighbours_.size(); }
  /// Where a vertex's neighbours begin among all.
  uint64_t first(Vertex vertex) const { return first_[vertex]; }
  uint64_t degree(Vertex vertex) const { return first_[vertex + size_t{1}] - first_[vertex]; }
  std::span<const Vertex> neighbours(Vertex vertex) const {
    return std::span(neighbours_).subspan(first_[vertex], degree(vertex));
  }
  /// Every edge the other way round.
  Csr reversed() const;
  /// Every edge both ways.
  Csr both_ways() const;
  /// Each edge once, and none from a vertex to itself.
  Csr simple() const;
  std::span<const uint64_t> firsts() const { return first_; }
  std::span<const Vertex> all_neighbours() const { return neighbours_; }

 private:
  template <typename EachEdge>
  static Csr from_edges(uint64_t vertices, const EachEdge& each_edge);

  std::vector<uint64_t> first_;
  std::vector<Vertex> neighbours_;
};

}  // namespace smartinf::graph
