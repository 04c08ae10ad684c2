#include "smartinf/graph/shares.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"

namespace smartinf::graph {
namespace {

constexpr uint32_t kNobody = ~uint32_t{0};

std::vector<Vertex> own_vertices(const Spread& spread, uint32_t server) {
  const uint32_t ranks = spread.ranks_of_server();
  const Vertex first = spread.bounds[server * ranks];
  std::vector<Vertex> own(spread.bounds[(server + 1) * ranks] - first);
  std::iota(own.begin(), own.end(), first);
  return own;
}

}  // namespace

uint32_t Spread::owner(Vertex vertex) const {
  return static_cast<uint32_t>(std::ranges::upper_bound(bounds, vertex) - bounds.begin()) - 1;
}

std::vector<Propagation> propagations(uint32_t layers, uint32_t hops) {
  std::vector<Propagation> steps;
  for (uint32_t step = 0; step + 1 < 2 * layers; ++step) {
    const bool alone = step < hops;
    steps.push_back(
        {.out = alone ? hops - 1 - step : 0, .between = !alone, .preloaded = alone && step == 0});
  }
  return steps;
}

std::vector<Propagation> sampled_propagations(uint32_t layers, uint32_t hops) {
  std::vector<Propagation> steps;
  for (uint32_t l = 0; l < layers; ++l) {
    steps.push_back({.out = std::min(hops, layers - 1 - l), .preloaded = l == 0});
  }
  for (uint32_t l = layers; l-- > 1;) {
    steps.push_back({.out = std::min(hops, layers - l)});
  }
  return steps;
}

Csr sampled_graph(const Csr& csr, const Spread& spread, uint32_t server, const Sampling& sampling) {
  const HopOrder sample = Neighbourhood(csr).sample(own_vertices(spread, server), sampling);
  std::vector<bool> is_in(csr.vertices());
  for (const Vertex v : sample.vertices) is_in[v] = true;
  std::vector<uint64_t> first{0};
  std::vector<Vertex> neighbours;
  for (Vertex v = 0; v < csr.vertices(); ++v) {
    if (is_in[v]) {
      std::ranges::copy_if(csr.neighbours(v), std::back_inserter(neighbours),
                           [&](Vertex to) { return is_in[to]; });
    }
    first.push_back(neighbours.size());
  }
  return Csr::of_rows(std::move(first), std::move(neighbours)).value();
}

ServerShare::ServerShare(const Csr& csr, const Spread& spread, uint32_t server, uint32_t rings,
                         uint64_t piece_vertices)
    : csr_(csr),
      spread_(spread),
      first_rank_(server * spread.ranks_of_server()),
      of_(spread.ranks_of_server()),
      made_by_(csr.vertices(), kNobody),
      seen_(csr.vertices()) {
  const uint32_t ranks = spread.ranks_of_server();
  const auto add = [&](uint32_t to, Vertex vertex) {
    of_[to].vertices.push_back(vertex);
    made_by_[vertex] = first_rank_ + to;
  };
  for (uint32_t to = 0; to < ranks; ++to) {
    for (Vertex v = spread.bounds[first_rank_ + to]; v < spread.bounds[first_rank_ + to + 1]; ++v) {
      add(to, v);
    }
    of_[to].ends.push_back(of_[to].vertices.size());
  }
  const HopOrder order = Neighbourhood(csr).within(own_vertices(spread, server), rings);
  uint64_t number = 0;
  for (uint32_t ring = 1; ring <= rings; ++ring) {
    const size_t begin = order.ends[ring - 1];
    const size_t all = base::divide_up(order.ends[ring] - begin, piece_vertices);
    for (uint32_t to = 0; to < ranks; ++to) {
      OfRank& of = of_[to];
      for (size_t p = all * to / ranks; p < all * (to + 1) / ranks; ++p) {
        const size_t first = begin + p * piece_vertices;
        const size_t count = std::min(piece_vertices, order.ends[ring] - first);
        of.pieces.push_back({ring, of.vertices.size(), count, number + p});
        for (size_t i = first; i < first + count; ++i) add(to, order.vertices[i]);
      }
      of.ends.push_back(of.vertices.size());
    }
    number += all;
  }
}

std::span<const Vertex> ServerShare::computed(uint32_t rank, uint32_t rings) const {
  const OfRank& of = of_[local(rank)];
  return std::span(of.vertices).first(of.ends[std::min<size_t>(rings, of.ends.size() - 1)]);
}

template <typename Has>
std::vector<Vertex> ServerShare::neighbours_without(std::span<const Vertex> of, const Has& has) {
  std::vector<Vertex> found;
  for (const Vertex v : of) {
    for (const Vertex to : csr_.neighbours(v)) {
      if (seen_[to] || has(to)) continue;
      seen_[to] = true;
      found.push_back(to);
    }
  }
  for (const Vertex v : found) seen_[v] = false;
  std::ranges::sort(found);
  return found;
}

std::vector<Vertex> ServerShare::read_only(uint32_t rank) {
  return neighbours_without(of_[local(rank)].vertices,
                            [&](Vertex v) { return made_by_[v] == rank; });
}

std::vector<std::vector<Vertex>> ServerShare::lacking(uint32_t rank, const Propagation& step) {
  std::vector<std::vector<Vertex>> lacking(spread_.ranks());
  if (step.preloaded) return lacking;
  const auto maker = [&](Vertex v) { return step.between ? spread_.owner(v) : made_by_[v]; };
  for (const Vertex v :
       neighbours_without(computed(rank, step.out), [&](Vertex to) { return maker(to) == rank; })) {
    lacking[maker(v)].push_back(v);
  }
  return lacking;
}

double predicted_seconds(const PreloadCost& cost, const PreloadRates& rates) {
  return cost.work * rates.alone_s + cost.exchanges * rates.exchange_s +
         static_cast<double>(cost.row_bytes) / rates.rows +
         static_cast<double>(cost.within_bytes) / rates.within +
         static_cast<double>(cost.between_bytes) / rates.between;
}

base::Result<size_t> choose_preload(std::span<const PreloadCost> costs, const PreloadRates& rates) {
  std::optional<size_t> best;
  uint64_t least = ~uint64_t{0};
  for (size_t i = 0; i < costs.size(); ++i) {
    least = std::min(least, costs[i].room_bytes);
    if (costs[i].room_bytes > rates.room_bytes) continue;
    if (!best || predicted_seconds(costs[i], rates) < predicted_seconds(costs[*best], rates)) {
      best = i;
    }
  }
  if (best) return *best;
  return base::Status(
      base::ErrorCode::kOutOfMemory,
      fmt::format("the largest rank's tables need {} at least, and it has room for {}",
                  base::format_bytes(least), base::format_bytes(rates.room_bytes)),
      "Give ranks more room, or take more ranks.");
}

}  // namespace smartinf::graph
