#include "smartinf/graph/generators.h"

#include <array>
#include <bit>
#include <random>

namespace smartinf::graph {
namespace {

uint64_t below(std::mt19937_64& random, uint64_t bound) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random()) * bound >> 64);
}

}  // namespace

std::vector<Edge> rmat_edges(uint64_t vertices, uint64_t edges, uint64_t seed,
                             const RmatShares& shares) {
  std::mt19937_64 random(seed);
  const auto levels = static_cast<int>(std::bit_width(vertices - 1));
  const auto of = [](double share) { return static_cast<uint32_t>(share * 0x1p32); };
  const std::array<uint32_t, 3> upto{of(shares.a), of(shares.a + shares.b),
                                     of(shares.a + shares.b + shares.c)};
  std::vector<Edge> list;
  list.reserve(edges);
  while (list.size() < edges) {
    uint64_t from = 0;
    uint64_t to = 0;
    uint64_t bits = 0;
    for (int level = 0; level < levels; ++level) {
      bits = level % 2 == 0 ? random() : bits >> 32;
      const auto draw = static_cast<uint32_t>(bits);
      // Quarters: a 00, b 01, c 10, d 11.
      const uint64_t quarter = uint64_t{draw >= upto[0]} + (draw >= upto[1]) + (draw >= upto[2]);
      from = 2 * from + (quarter >> 1);
      to = 2 * to + (quarter & 1);
    }
    if (from < vertices && to < vertices) {
      list.push_back({static_cast<Vertex>(from), static_cast<Vertex>(to)});
    }
  }
  return list;
}

std::vector<Edge> uniform_edges(uint64_t vertices, uint64_t edges, uint64_t seed) {
  return block_edges(vertices, edges, 1, 0, seed);
}

std::vector<Edge> block_edges(uint64_t vertices, uint64_t edges, uint64_t blocks, double inside,
                              uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Edge> list(edges);
  for (Edge& edge : list) {
    const uint64_t from = below(random, vertices);
    const uint64_t block = from * blocks / vertices;
    // The block's vertices are those v with v * blocks / vertices == block.
    const auto begin = [&](uint64_t of) { return (of * vertices + blocks - 1) / blocks; };
    const bool stays = static_cast<double>(random() >> 11) * 0x1p-53 < inside;
    const uint64_t first = stays ? begin(block) : 0;
    const uint64_t end = stays ? begin(block + 1) : vertices;
    edge = {static_cast<Vertex>(from), static_cast<Vertex>(first + below(random, end - first))};
  }
  return list;
}

}  // namespace smartinf::graph
