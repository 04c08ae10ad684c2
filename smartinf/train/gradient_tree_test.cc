#include "smartinf/train/gradient_tree.h"

#include <vector>

#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

namespace smartinf::train {
namespace {

using torch::Tensor;

/// The sums of a rank's micro batches.
std::vector<Tensor> sums_of(const std::vector<Tensor>& gradients, uint32_t rank, uint32_t world) {
  const plan::MicroBatchRange mine = plan::micro_batches_of(gradients.size(), rank, world);
  GradientTree tree(gradients.size(), mine);
  for (uint64_t i = mine.begin; i < mine.end; ++i) tree.add(gradients[i].clone());
  return tree.take();
}

/// As the owner of the elements adds what the ranks have sent.
Tensor sum_on(const std::vector<Tensor>& gradients, uint32_t world) {
  const uint64_t count = gradients.size();
  plan::MicroBatchSum sum(count);
  std::vector<Tensor> values;
  for (uint32_t rank = 0; rank < world; ++rank) {
    const auto nodes = plan::summation_nodes(count, plan::micro_batches_of(count, rank, world));
    const auto sums = sums_of(gradients, rank, world);
    EXPECT_EQ(sums.size(), nodes.size());
    for (size_t i = 0; i < nodes.size(); ++i) {
      EXPECT_EQ(sums[i].scalar_type() == torch::kFloat32, nodes[i].size() > 1);
      values.push_back(sums[i].to(torch::kFloat32));
      for (uint32_t left = sum.push(nodes[i]); left > 0; --left) {
        const Tensor right = values.back();
        values.pop_back();
        values.back() = values.back() + right;
      }
    }
  }
  EXPECT_EQ(values.size(), 1u);
  return values.front();
}

TEST(GradientTree, SumsHaveTheSameBitsOnAnyNumberOfRanks) {
  torch::manual_seed(3);
  for (int64_t count = 2; count <= 9; ++count) {
    std::vector<Tensor> gradients;
    Tensor in_order;
    for (int64_t i = 0; i < count; ++i) {
      // Values of many magnitudes: else few of such short numbers have an exact sum.
      const Tensor sizes = torch::rand({1000}).mul(20).exp();
      gradients.push_back((torch::rand({1000}) * sizes).to(torch::kBFloat16));
      in_order = i == 0 ? gradients[0].to(torch::kFloat32) : in_order + gradients.back();
    }
    const Tensor whole = sums_of(gradients, 0, 1).at(0);
    EXPECT_EQ(whole.scalar_type(), torch::kFloat32);
    EXPECT_TRUE(torch::allclose(whole, in_order, 1e-5, 1e-5));
    EXPECT_EQ(torch::equal(whole, in_order), count <= 3) << "an order of its own";
    for (uint32_t world = 1; world <= count; ++world) {
      EXPECT_TRUE(torch::equal(sum_on(gradients, world), whole)) << world << " of " << count;
    }
  }
}

TEST(GradientTree, TheOnlyGradientStaysAsItIs) {
  const Tensor gradient = torch::randn({8}).to(torch::kBFloat16);
  GradientTree tree(1, {0, 1});
  tree.add(gradient);
  EXPECT_TRUE(tree.take().at(0).is_same(gradient));
}

}  // namespace
}  // namespace smartinf::train
