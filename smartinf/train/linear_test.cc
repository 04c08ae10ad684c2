#include "smartinf/train/linear.h"

#include <functional>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace smartinf::train {
namespace {

using torch::Tensor;

struct Made {
  Tensor y;
  Tensor x_gradient;
  Tensor weight_gradient;
  Tensor bias_gradient;
};

Made run(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& gradient,
         const std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)>& linear,
         torch::ScalarType type) {
  const auto leaf = [&](const Tensor& one) {
    return one.to(type).detach().clone().requires_grad_();
  };
  const Tensor x_ = leaf(x);
  const Tensor weight_ = leaf(weight);
  const Tensor bias_ = leaf(bias);
  const Tensor y = linear(x_, weight_, bias_);
  y.backward(gradient.to(type));
  return {y.detach(), x_.grad(), weight_.grad(), bias_.grad()};
}

/// Sums of products of bf16 numbers in f32, rounded once: what f32 gives, rounded, to a unit or two
/// where sums in other orders fall on other sides of a rounding.
void expect_rounded(const Tensor& bf16, const Tensor& f32) {
  ASSERT_EQ(bf16.scalar_type(), torch::kBFloat16);
  ASSERT_EQ(bf16.sizes(), f32.sizes());
  const Tensor off = (bf16.to(torch::kFloat32) - f32).abs();
  EXPECT_TRUE((off <= f32.abs() / 128 + 1e-4).all().item<bool>()) << off.max();
  EXPECT_LT((bf16 != f32.to(torch::kBFloat16)).to(torch::kFloat32).mean().item<float>(), 0.01f);
}

TEST(Linear, BlocksInF32GiveWhatF32GivesRounded) {
  torch::manual_seed(1);
  struct Sizes {
    std::vector<int64_t> x;
    int64_t out;
  };
  for (const Sizes& sizes : {Sizes{{2, 5, 96}, 33}, Sizes{{1, 1}, 1}, Sizes{{1025, 40}, 2049},
                             Sizes{{3, 1100}, 1024}, Sizes{{0, 7}, 5}}) {
    const auto bf16 = torch::dtype(torch::kBFloat16);
    const Tensor x = torch::randn(sizes.x, bf16);
    const Tensor weight = torch::randn({sizes.out, x.size(-1)}, bf16);
    const Tensor bias = torch::randn({sizes.out}, bf16);
    std::vector<int64_t> of_y = sizes.x;
    of_y.back() = sizes.out;
    const Tensor gradient = torch::randn(of_y, bf16);
    const auto ours = [](const Tensor& a, const Tensor& b, const Tensor& c) {
      return linear_in_f32(a, b, c);
    };
    const auto torchs = [](const Tensor& a, const Tensor& b, const Tensor& c) {
      return torch::linear(a, b, c);
    };
    const Made here = run(x, weight, bias, gradient, ours, torch::kBFloat16);
    const Made there = run(x, weight, bias, gradient, torchs, torch::kFloat32);
    if (x.numel() == 0) {
      EXPECT_EQ(here.y.sizes(), there.y.sizes());
      continue;
    }
    expect_rounded(here.y, there.y);
    expect_rounded(here.x_gradient, there.x_gradient);
    expect_rounded(here.weight_gradient, there.weight_gradient);
    expect_rounded(here.bias_gradient, there.bias_gradient);
  }
}

TEST(Linear, NothingIsMadeForWhatNeedsNoGradient) {
  const auto bf16 = torch::dtype(torch::kBFloat16);
  const Tensor x = torch::randn({4, 8}, bf16).requires_grad_();
  const Tensor frozen = torch::randn({3, 8}, bf16);
  linear_in_f32(x, frozen).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(frozen.grad().defined());
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(linear_in_f32(x, frozen).requires_grad());
}

TEST(Linear, TypesAndTransposedWeights) {
  const Tensor x = torch::randn({2, 3, 8});
  const Tensor matrix = torch::randn({8, 6});
  EXPECT_TRUE(torch::equal(train::linear(x, matrix.t()), torch::linear(x, matrix.t())));
  const Tensor there = torch::linear(x.to(torch::kBFloat16).to(torch::kFloat32),
                                     matrix.t().to(torch::kBFloat16).to(torch::kFloat32));
  expect_rounded(train::linear(x.to(torch::kBFloat16), matrix.to(torch::kBFloat16).t()), there);
}

}  // namespace
}  // namespace smartinf::train
