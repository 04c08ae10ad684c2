// The gradients of a step's micro batches are added up by a tree over their numbers, so that the
// sum has the same bits however many ranks compute parts of it:
//
//   f(lo, hi) = f(lo, mid) + f(mid, hi),  mid = lo + the largest power of two below hi - lo
//
// A leaf is the gradient of one micro batch, cast to f32; every node above it is f32. Of one
// micro batch alone there is nothing to add, and its gradient stays as it is. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace smartinf::plan {

/// Micro batches [begin, end) of a step.
struct MicroBatchRange {
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t size() const { return end - begin; }
  friend bool operator==(const MicroBatchRange&, const MicroBatchRange&) = default;
};

/// The micro batches of a step of `count` that a rank computes: count * rank / world and those
/// behind it. Empty for some ranks when there are fewer micro batches than ranks. rank < world.
MicroBatchRange micro_batches_of(uint64_t count, uint32_t rank, uint32_t world);

/// Whether the tree over [0, count) has this node.
bool is_summation_node(uint64_t count, MicroBatchRange node);

/// The largest nodes of the tree over [0, count) that lie within `range`, in order; together they
/// are all of it. At most 2 * log2(count) of them.
std::vector<MicroBatchRange> summation_nodes(uint64_t count, MicroBatchRange range);

/// Adds up nodes as they come. It holds no values: its caller has a stack of them.
class MicroBatchSum {
 public:
  /// Sum over a step of `count` micro batches.
  explicit MicroBatchSum(uint64_t count) : count_(count) {}

  /// The value of the next node is on top of the stack; each node begins where the one before it
  /// ends. Returns how many times the topmost value is to be added to the one below it and taken
  /// off. SI_CHECK: a node of the tree.
  uint32_t push(MicroBatchRange node);
  /// Nodes of the values on the stack, the topmost last: summation_nodes() of all that came.
  std::span<const MicroBatchRange> sums() const { return sums_; }

 private:
  uint64_t count_;
  std::vector<MicroBatchRange> sums_;
};

}  // namespace smartinf::plan
