#include "smartinf/graph/neighbourhood.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace smartinf::graph {
namespace {

/// A number that looks random, from two (splitmix64).
uint64_t mixed(uint64_t seed, uint64_t value) {
  uint64_t x = seed + (value + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Neighbourhood::Neighbourhood(const Csr& csr) : csr_(csr), taken_(csr.vertices()) {}

void Neighbourhood::add(Vertex v, HopOrder& order) {
  if (taken_[v]) return;
  taken_[v] = true;
  order.vertices.push_back(v);
}

void Neighbourhood::begin(std::span<const Vertex> seeds, HopOrder& order) {
  for (const Vertex v : seeds) add(v, order);
  order.ends.push_back(order.vertices.size());
}

void Neighbourhood::forget(std::span<const Vertex> vertices) {
  for (const Vertex v : vertices) taken_[v] = false;
}

HopOrder Neighbourhood::within(std::span<const Vertex> seeds, uint32_t hops) {
  HopOrder order;
  begin(seeds, order);
  size_t from = 0;
  for (uint32_t hop = 0; hop < hops; ++hop) {
    const size_t end = order.vertices.size();
    for (; from < end; ++from) {
      for (const Vertex to : csr_.neighbours(order.vertices[from])) add(to, order);
    }
    std::sort(order.vertices.begin() + static_cast<int64_t>(end), order.vertices.end());
    order.ends.push_back(order.vertices.size());
  }
  forget(order.vertices);
  return order;
}

HopOrder Neighbourhood::sample(std::span<const Vertex> seeds, const Sampling& sampling) {
  HopOrder order;
  begin(seeds, order);
  // Of each vertex: neighbours that are taken.
  std::vector<uint32_t> links(csr_.vertices());
  const auto count_links = [&](size_t first) {
    for (size_t i = first; i < order.vertices.size(); ++i) {
      for (const Vertex to : csr_.neighbours(order.vertices[i])) ++links[to];
    }
  };
  count_links(0);
  struct Candidate {
    uint64_t leads_to;
    uint64_t draw;
    Vertex vertex;
  };
  std::vector<Candidate> candidates;
  size_t from = 0;
  for (uint32_t hop = 0; hop < sampling.hops; ++hop) {
    const size_t end = order.vertices.size();
    for (; from < end; ++from) {
      candidates.clear();
      for (const Vertex to : csr_.neighbours(order.vertices[from])) {
        if (taken_[to]) continue;
        candidates.push_back({csr_.degree(to) - links[to], mixed(sampling.seed, to), to});
      }
      const size_t count = std::min<size_t>(candidates.size(), sampling.fanout);
      std::partial_sort(candidates.begin(), candidates.begin() + static_cast<int64_t>(count),
                        candidates.end(), [](const Candidate& a, const Candidate& b) {
                          return std::tie(b.leads_to, a.draw, a.vertex) <
                                 std::tie(a.leads_to, b.draw, b.vertex);
                        });
      const size_t first = order.vertices.size();
      for (size_t i = 0; i < count; ++i) add(candidates[i].vertex, order);
      count_links(first);
    }
    std::sort(order.vertices.begin() + static_cast<int64_t>(end), order.vertices.end());
    order.ends.push_back(order.vertices.size());
  }
  forget(order.vertices);
  return order;
}

Csr Neighbourhood::induced(std::span<const Vertex> vertices) {
  places_.resize(csr_.vertices());
  for (size_t i = 0; i < vertices.size(); ++i) {
    taken_[vertices[i]] = true;
    places_[vertices[i]] = static_cast<uint32_t>(i);
  }
  std::vector<uint64_t> first{0};
  std::vector<Vertex> neighbours;
  for (const Vertex v : vertices) {
    for (const Vertex to : csr_.neighbours(v)) {
      if (taken_[to]) neighbours.push_back(places_[to]);
    }
    std::sort(neighbours.begin() + static_cast<int64_t>(first.back()), neighbours.end());
    first.push_back(neighbours.size());
  }
  forget(vertices);
  return Csr::of_rows(std::move(first), std::move(neighbours)).value();
}

std::vector<PartRows> part_rows(const Csr& csr, std::span<const Vertex> bounds) {
  std::vector<PartRows> rows;
  Neighbourhood around(csr);
  std::vector<Vertex> own;
  for (size_t p = 0; p + 1 < bounds.size(); ++p) {
    own.resize(bounds[p + 1] - bounds[p]);
    std::iota(own.begin(), own.end(), bounds[p]);
    const HopOrder order = around.within(own, 1);
    rows.push_back({order.ends[0], order.ends[1] - order.ends[0]});
  }
  return rows;
}

}  // namespace smartinf::graph
