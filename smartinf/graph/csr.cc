#include "smartinf/graph/csr.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include <fmt/format.h>

namespace smartinf::graph {

using base::ErrorCode;
using base::Result;
using base::Status;

Result<std::vector<Edge>> edges_of_text(std::string_view text, const std::string& path) {
  const auto wrong = [&](uint64_t line, std::string_view what, std::string advice) {
    base::ErrorPlace place;
    place.path = path;
    return Status(ErrorCode::kInvalidArgument, fmt::format("line {} {}", line, what),
                  std::move(advice), std::move(place));
  };
  std::vector<Edge> edges;
  uint64_t line = 1;
  for (size_t at = 0; at < text.size(); ++line) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const char* next = text.data() + at;
    const char* const last = text.data() + end;
    at = end + 1;
    const auto skip = [&] {
      while (next < last && (*next == ' ' || *next == '\t' || *next == ',' || *next == '\r'))
        ++next;
    };
    skip();
    if (next == last || *next == '#') continue;
    Edge edge;
    for (Vertex* vertex : {&edge.from, &edge.to}) {
      const auto [stop, error] = std::from_chars(next, last, *vertex);
      if (error != std::errc()) {
        return wrong(line, "has no edge: two numbers of vertices",
                     "Write \"from to\" on each line.");
      }
      next = stop;
      skip();
    }
    if (next != last) {
      return wrong(line, "has more than two numbers", "Edges have no weights here.");
    }
    edges.push_back(edge);
  }
  return edges;
}

uint64_t vertices_of(std::span<const Edge> edges) {
  uint64_t vertices = 0;
  for (const Edge& edge : edges)
    vertices = std::max(vertices, uint64_t{1} + std::max(edge.from, edge.to));
  return vertices;
}

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

Result<Csr> Csr::of_rows(std::vector<uint64_t> first, std::vector<Vertex> neighbours) {
  const auto wrong = [](std::string what) {
    return Status(ErrorCode::kCorrupt, std::move(what), "Make the graph again.");
  };
  if (first.empty() || first[0] != 0 || first.back() != neighbours.size()) {
    return wrong(fmt::format("rows of neighbours end at {}, and there are {}",
                             first.empty() ? 0 : first.back(), neighbours.size()));
  }
  const size_t vertices = first.size() - 1;
  for (size_t v = 0; v < vertices; ++v) {
    if (first[v] > first[v + 1] || first[v + 1] > neighbours.size()) {
      return wrong(fmt::format("neighbours of vertex {} are {} to {}", v, first[v], first[v + 1]));
    }
    for (uint64_t i = first[v]; i < first[v + 1]; ++i) {
      if (neighbours[i] >= vertices) {
        return wrong(fmt::format("vertex {} has the neighbour {}, but there are {} vertices", v,
                                 neighbours[i], vertices));
      }
      if (i > first[v] && neighbours[i] < neighbours[i - 1]) {
        return wrong(fmt::format("neighbours of vertex {} do not rise", v));
      }
    }
  }
  Csr csr;
  csr.first_ = std::move(first);
  csr.neighbours_ = std::move(neighbours);
  return csr;
}

Csr Csr::simple() const {
  Csr csr;
  csr.first_.push_back(0);
  for (Vertex v = 0; v < vertices(); ++v) {
    for (const Vertex to : neighbours(v)) {
      const bool again = csr.neighbours_.size() > csr.first_.back() && csr.neighbours_.back() == to;
      if (to != v && !again) csr.neighbours_.push_back(to);
    }
    csr.first_.push_back(csr.neighbours_.size());
  }
  return csr;
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
