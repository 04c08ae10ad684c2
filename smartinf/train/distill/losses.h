// How far a student is from its teacher: of a block's output, and of the logits.
#pragma once

#include <cstdint>

#include <torch/types.h>

#include "smartinf/train/distill/layered_model.h"
#include "smartinf/train/distill/options.h"
#include "smartinf/train/top_logits.h"

namespace smartinf::train {

/// The loss of a block's output, a scalar of f32. y, target: [B, T, C].
torch::Tensor block_loss(BlockLoss loss, const torch::Tensor& y_BTC,
                         const torch::Tensor& target_BTC);

/// x: [B, T, C] in front of the head. k is below the vocabulary's size.
TopLogits top_logits(const LayeredModel::Head& head, const torch::Tensor& x_BTC, uint32_t k);

/// A last block's loss and the gradient of its output.
struct HeadLoss {
  torch::Tensor loss;  // scalar of f32
  torch::Tensor gradient_BTC;
};
/// The mean of divergence() over rows. Logits are made for some rows at a time.
HeadLoss head_divergence(const LayeredModel::Head& head, const torch::Tensor& x_BTC,
                         const TopLogits& teacher);

}  // namespace smartinf::train
