// A parameter's gradients of a step's micro batches, added by the tree of plan/micro_batches.h: the
// sum has the same bits however many ranks compute the micro batches.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <torch/types.h>

#include "smartinf/plan/micro_batches.h"

namespace smartinf::train {

/// Threads: one caller.
class GradientTree {
 public:
  /// count: micro batches of the step; mine: those whose gradients come here. by_tree: false: all
  /// come here, and each is added to the sum of those before it.
  GradientTree(uint64_t count, plan::MicroBatchRange mine, bool by_tree = true)
      : count_(count), mine_(mine), by_tree_(by_tree), next_(mine.begin), sum_(count) {}

  /// Adds the gradient of the next micro batch. Gradients of bf16 are added in f32.
  void add(torch::Tensor gradient) {
    if (!by_tree_) return add_to_sum(std::move(gradient));
    // Only what others are added to has to be f32, and where nothing is added it stays small.
    const bool is_added_to =
        next_ + 2 <= mine_.end && plan::is_summation_node(count_, {next_, next_ + 2});
    if (is_added_to) {
      gradient = gradient.to(torch::kFloat32, /*non_blocking=*/false, /*copy=*/true);
    }
    values_.push_back(std::move(gradient));
    for (uint32_t left = sum_.push({next_, next_ + 1}); left > 0; --left) {
      const torch::Tensor right = std::move(values_.back());
      values_.pop_back();
      values_.back().add_(right);
    }
    ++next_;
  }

  /// Takes the sums of plan::summation_nodes(count, mine), in their order: of the gradients' type
  /// where it is one micro batch, else f32. Once, when all have come.
  std::vector<torch::Tensor> take() { return std::move(values_); }

 private:
  void add_to_sum(torch::Tensor gradient) {
    if (!values_.empty()) {
      values_.back().add_(gradient);
    } else if (count_ == 1) {
      values_.push_back(std::move(gradient));
    } else {
      values_.push_back(gradient.to(torch::kFloat32, /*non_blocking=*/false, /*copy=*/true));
    }
  }

  uint64_t count_;
  plan::MicroBatchRange mine_;
  bool by_tree_;
  uint64_t next_;
  plan::MicroBatchSum sum_;
  std::vector<torch::Tensor> values_;
};

}  // namespace smartinf::train
