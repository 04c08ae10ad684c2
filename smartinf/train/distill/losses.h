// How far a student is from its teacher: of a block's output, and of the logits.
#pragma once

#include <cstdint>

#include <torch/types.h>

#include "smartinf/train/distill/layered_model.h"
#include "smartinf/train/distill/options.h"

namespace smartinf::train {

/// The loss of a block's output, a scalar of f32. y, target: [B, T, C].
torch::Tensor block_loss(BlockLoss loss, const torch::Tensor& y_BTC,
                         const torch::Tensor& target_BTC);

/// What is kept of a teacher's logits: the K most likely tokens of each row.
struct TopLogits {
  torch::Tensor token_MK;    // int32
  torch::Tensor chances_ML;  // f32 logarithms of their chances; the last of L = K + 1 is of all
                             // other tokens together
};
/// x: [B, T, C] in front of the head. k is below the vocabulary's size.
TopLogits top_logits(const LayeredModel::Head& head, const torch::Tensor& x_BTC, uint32_t k);

/// A last block's loss and the gradient of its output.
struct HeadLoss {
  torch::Tensor loss;  // scalar of f32
  torch::Tensor gradient_BTC;
};
/// The mean over rows of the Kullback-Leibler divergence of the student's chances from the
/// teacher's, in nats, over K tokens and all others as one. Logits are made for some rows at a
/// time. Source: Hinton et al. 2015 (1503.02531), of K classes and a rest.
HeadLoss head_divergence(const LayeredModel::Head& head, const torch::Tensor& x_BTC,
                         const TopLogits& teacher);

}  // namespace smartinf::train
