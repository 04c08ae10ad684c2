#include "smartinf/train/distill/losses.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <torch/autograd.h>

#include "smartinf/plan/training_memory.h"

namespace smartinf::train {

using torch::Tensor;

namespace {

template <typename Visit>
void for_rows(const LayeredModel::Head& head, int64_t count, Visit visit) {
  const auto at_once =
      static_cast<int64_t>(plan::head_rows(static_cast<uint64_t>(head.matrix_VC.size(0))));
  for (int64_t from = 0; from < count; from += at_once) {
    visit(from, std::min(at_once, count - from));
  }
}

}  // namespace

Tensor block_loss(BlockLoss loss, const Tensor& y_BTC, const Tensor& target_BTC) {
  const Tensor y = y_BTC.to(torch::kFloat32);
  const Tensor target = target_BTC.to(torch::kFloat32);
  constexpr double kNotZero = 1e-20;  // a token whose row is zero counts nothing
  if (loss == BlockLoss::kMse) {
    return ((y - target).square().sum(-1) / target.square().sum(-1).clamp_min(kNotZero)).mean();
  }
  // 1 - cos(y, t), as half the square of the distance of the directions: 0 for equal bits.
  const auto direction = [&](const Tensor& x) {
    return x / x.square().sum(-1, /*keepdim=*/true).clamp_min(kNotZero).sqrt();
  };
  return 0.5 * (direction(y) - direction(target)).square().sum(-1).mean();
}

TopLogits top_logits(const LayeredModel::Head& head, const Tensor& x_BTC, uint32_t k) {
  const torch::NoGradGuard no_grad;
  const Tensor h_MC = head.normed(x_BTC);
  std::vector<Tensor> tokens;
  std::vector<Tensor> chances;
  for_rows(head, h_MC.size(0), [&](int64_t from, int64_t some) {
    TopLogits made = top_logits(head.logits(h_MC.narrow(0, from, some)), int64_t{k});
    tokens.push_back(std::move(made.token_MK));
    chances.push_back(std::move(made.chances_ML));
  });
  return {torch::cat(tokens), torch::cat(chances)};
}

HeadLoss head_divergence(const LayeredModel::Head& head, const Tensor& x_BTC,
                         const TopLogits& teacher) {
  const Tensor x = x_BTC.detach().requires_grad_(true);
  const Tensor h_MC = head.normed(x);
  const double share = 1.0 / static_cast<double>(h_MC.size(0));
  Tensor sum;
  std::vector<Tensor> gradients;
  for_rows(head, h_MC.size(0), [&](int64_t from, int64_t some) {
    const Tensor part_RC = h_MC.detach().narrow(0, from, some).requires_grad_(true);
    const Tensor logits_RV = head.logits(part_RC);
    const torch::NoGradGuard no_grad;
    Divergence part = divergence(logits_RV, teacher.rows(from, some));
    sum = sum.defined() ? sum + part.loss : part.loss;
    gradients.push_back(torch::autograd::grad(
        {logits_RV}, {part_RC}, {part.gradient_RV.mul_(share).to(logits_RV.scalar_type())})[0]);
  });
  Tensor gradient = torch::autograd::grad({h_MC}, {x}, {torch::cat(gradients)})[0];
  return {sum * share, std::move(gradient)};
}

}  // namespace smartinf::train
