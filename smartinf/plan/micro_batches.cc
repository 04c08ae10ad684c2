#include "smartinf/plan/micro_batches.h"

#include <bit>

#include "smartinf/base/check.h"

namespace smartinf::plan {

namespace {

/// Where a node of two or more is divided.
uint64_t middle(MicroBatchRange node) { return node.begin + std::bit_floor(node.size() - 1); }

bool within(MicroBatchRange inner, MicroBatchRange outer) {
  return inner.begin >= outer.begin && inner.end <= outer.end;
}

void add_nodes(MicroBatchRange node, MicroBatchRange range, std::vector<MicroBatchRange>& nodes) {
  if (node.end <= range.begin || range.end <= node.begin) return;
  if (within(node, range)) {
    nodes.push_back(node);
    return;
  }
  const uint64_t mid = middle(node);
  add_nodes({node.begin, mid}, range, nodes);
  add_nodes({mid, node.end}, range, nodes);
}

}  // namespace

MicroBatchRange micro_batches_of(uint64_t count, uint32_t rank, uint32_t world) {
  SI_CHECK(rank < world, "a rank that is none of the world's");
  // Not count * rank, which may be too large.
  const auto before = [&](uint64_t r) { return count / world * r + count % world * r / world; };
  return {before(rank), before(uint64_t{rank} + 1)};
}

bool is_summation_node(uint64_t count, MicroBatchRange node) {
  if (node.begin >= node.end || node.end > count) return false;
  MicroBatchRange at{0, count};
  while (!(at == node)) {
    if (at.size() < 2) return false;
    const uint64_t mid = middle(at);
    const MicroBatchRange half =
        node.begin < mid ? MicroBatchRange{at.begin, mid} : MicroBatchRange{mid, at.end};
    if (!within(node, half)) return false;
    at = half;
  }
  return true;
}

std::vector<MicroBatchRange> summation_nodes(uint64_t count, MicroBatchRange range) {
  SI_CHECK(range.begin <= range.end && range.end <= count, "micro batches that are none");
  std::vector<MicroBatchRange> nodes;
  if (range.size() > 0) add_nodes({0, count}, range, nodes);
  return nodes;
}

uint32_t MicroBatchSum::push(MicroBatchRange node) {
  SI_CHECK(is_summation_node(count_, node), "micro batches that are no node of the tree");
  SI_CHECK(sums_.empty() || sums_.back().end == node.begin, "micro batches out of order");
  sums_.push_back(node);
  uint32_t added = 0;
  while (sums_.size() > 1) {
    MicroBatchRange& below = sums_[sums_.size() - 2];
    const MicroBatchRange both{below.begin, sums_.back().end};
    if (!is_summation_node(count_, both) || middle(both) != below.end) break;
    below = both;
    sums_.pop_back();
    ++added;
  }
  return added;
}

}  // namespace smartinf::plan
