#include "smartinf/graph/partition.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/graph/metis.h"

namespace smartinf::graph {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

constexpr uint32_t kNone = ~uint32_t{0};
constexpr int kRefinementPasses = 8;

/// Every vertex once, breadth first from the lowest of each component.
std::vector<Vertex> breadth_first_order(const Csr& csr) {
  std::vector<Vertex> order;
  order.reserve(csr.vertices());
  std::vector<bool> seen(csr.vertices());
  for (Vertex from = 0; from < csr.vertices(); ++from) {
    if (seen[from]) continue;
    seen[from] = true;
    size_t next = order.size();
    order.push_back(from);
    for (; next < order.size(); ++next) {
      for (const Vertex to : csr.neighbours(order[next])) {
        if (!seen[to]) order.push_back(to);
        seen[to] = true;
      }
    }
  }
  return order;
}

/// Counts a vertex's neighbours by block.
class Links {
 public:
  explicit Links(uint32_t blocks) : counts_(blocks) {}
  /// f(block, links) of each block that has a neighbour of v, in the order of neighbours.
  template <typename F>
  void each(const Csr& csr, std::span<const uint32_t> block_of, Vertex v, const F& f) {
    for (const Vertex to : csr.neighbours(v)) {
      if (block_of[to] == kNone || to == v) continue;
      if (counts_[block_of[to]]++ == 0) touched_.push_back(block_of[to]);
    }
    for (const uint32_t block : touched_) f(block, counts_[block]);
    for (const uint32_t block : touched_) counts_[block] = 0;
    touched_.clear();
  }

 private:
  std::vector<uint32_t> counts_;
  std::vector<uint32_t> touched_;
};

std::vector<uint32_t> stream_partition(const Csr& csr, uint32_t blocks) {
  const uint64_t mean = base::divide_up(csr.vertices(), blocks);
  const uint64_t capacity = mean + mean / 32;
  std::vector<uint32_t> block_of(csr.vertices(), kNone);
  std::vector<uint64_t> sizes(blocks);
  Links links(blocks);
  // The block that vertices without placed neighbours go to, until it is full.
  uint32_t open = 0;
  for (const Vertex v : breadth_first_order(csr)) {
    while (sizes[open] >= capacity) ++open;
    uint32_t best = open;
    double best_score = 0;
    links.each(csr, block_of, v, [&](uint32_t block, uint32_t count) {
      const double room = 1 - static_cast<double>(sizes[block]) / static_cast<double>(capacity);
      const double score = count * room;
      if (score > best_score) std::tie(best, best_score) = std::pair(block, score);
    });
    block_of[v] = best;
    ++sizes[best];
  }
  std::vector<uint32_t> as_numbered(csr.vertices());
  for (Vertex v = 0; v < csr.vertices(); ++v) {
    as_numbered[v] = static_cast<uint32_t>(uint64_t{v} * blocks / csr.vertices());
  }
  if (cut_edges(csr, as_numbered) < cut_edges(csr, block_of)) {
    block_of = std::move(as_numbered);
    std::ranges::fill(sizes, 0u);
    for (const uint32_t block : block_of) ++sizes[block];
  }
  for (int pass = 0; pass < kRefinementPasses; ++pass) {
    bool moved = false;
    for (Vertex v = 0; v < csr.vertices(); ++v) {
      uint32_t best = block_of[v];
      uint32_t own = 0;
      uint32_t most = 0;
      links.each(csr, block_of, v, [&](uint32_t block, uint32_t count) {
        if (block == block_of[v]) own = count;
        if (count > most && (sizes[block] < capacity || block == block_of[v])) {
          std::tie(best, most) = std::pair(block, count);
        }
      });
      if (most <= own || sizes[block_of[v]] == 1) continue;
      --sizes[block_of[v]];
      ++sizes[best];
      block_of[v] = best;
      moved = true;
    }
    if (!moved) break;
  }
  return block_of;
}

}  // namespace

Result<std::vector<uint32_t>> partition(const Csr& csr, uint32_t blocks, PartitionMethod method) {
  if (blocks == 0 || blocks > csr.vertices()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} blocks of {} vertices", blocks, csr.vertices()),
                  "A block has one vertex at least.");
  }
  if (blocks == 1) return std::vector<uint32_t>(csr.vertices());
  if (method == PartitionMethod::kMetis) return metis_partition(csr, blocks);
  return stream_partition(csr, blocks);
}

uint64_t cut_edges(const Csr& csr, std::span<const uint32_t> block_of) {
  uint64_t cut = 0;
  for (Vertex v = 0; v < csr.vertices(); ++v) {
    for (const Vertex to : csr.neighbours(v)) cut += block_of[v] != block_of[to];
  }
  return cut;
}

BlockOrder order_blocks(const Csr& csr, std::span<const uint32_t> block_of, uint32_t blocks) {
  std::vector<std::vector<Vertex>> members(blocks);
  for (Vertex v = 0; v < csr.vertices(); ++v) members[block_of[v]].push_back(v);
  std::vector<uint32_t> sequence;
  std::vector<uint64_t> links(blocks);  // of each block to those that have a place
  std::vector<uint32_t> places(blocks, kNone);
  for (uint32_t i = 0; i < blocks; ++i) {
    uint32_t next = kNone;
    for (uint32_t block = 0; block < blocks; ++block) {
      if (places[block] != kNone) continue;
      if (next == kNone || links[block] > links[next]) next = block;
    }
    places[next] = i;
    sequence.push_back(next);
    for (const Vertex v : members[next]) {
      for (const Vertex to : csr.neighbours(v)) ++links[block_of[to]];
    }
  }
  // Of the other blocks that have edges to a vertex the two that come first, from 1; 0: none.
  const auto needed_by = [&](Vertex v) {
    std::pair lowest(kNone, kNone);
    for (const Vertex to : csr.neighbours(v)) {
      const uint32_t place = places[block_of[to]];
      if (place == places[block_of[v]] || place == lowest.first) continue;
      if (place < lowest.first) {
        lowest = {place, lowest.first};
      } else {
        lowest.second = std::min(lowest.second, place);
      }
    }
    return std::pair(lowest.first + 1, lowest.second + 1);
  };
  BlockOrder result;
  result.order.reserve(csr.vertices());
  result.first.push_back(0);
  for (const uint32_t block : sequence) {
    std::vector<std::pair<std::pair<uint32_t, uint32_t>, Vertex>> sorted;
    for (const Vertex v : members[block]) sorted.emplace_back(needed_by(v), v);
    std::ranges::sort(sorted);
    for (const auto& [needed, v] : sorted) result.order.push_back(v);
    result.first.push_back(static_cast<Vertex>(result.order.size()));
  }
  return result;
}

std::vector<Vertex> inverse(std::span<const Vertex> order) {
  std::vector<Vertex> numbers(order.size());
  for (size_t i = 0; i < order.size(); ++i) numbers[order[i]] = static_cast<Vertex>(i);
  return numbers;
}

Csr renumbered(const Csr& csr, std::span<const Vertex> order) {
  const std::vector<Vertex> number = inverse(order);
  std::vector<uint64_t> first(csr.vertices() + size_t{1});
  std::vector<Vertex> neighbours;
  neighbours.reserve(csr.edges());
  for (Vertex v = 0; v < csr.vertices(); ++v) {
    for (const Vertex to : csr.neighbours(order[v])) neighbours.push_back(number[to]);
    std::sort(neighbours.begin() + static_cast<int64_t>(first[v]), neighbours.end());
    first[v + size_t{1}] = neighbours.size();
  }
  return Csr::of_rows(std::move(first), std::move(neighbours)).value();
}

}  // namespace smartinf::graph
