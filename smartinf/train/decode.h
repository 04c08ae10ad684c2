// Continues sequences token by token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <torch/types.h>

#include "smartinf/train/sampling.h"
#include "smartinf/train/unit_pass.h"

namespace smartinf::train {

/// logits: [V]. draw: which of the seed's random numbers is used.
int64_t choose_token(const torch::Tensor& logits_V, const Sampling& sampling, uint64_t draw);

/// Continues each prompt, which is not empty, until it has options.tokens more, an end token or
/// options.positions in all. Prompts do not influence each other, also not by the numbers that are
/// drawn. positions: at most those that `model` was made for. weights: their type and device.
/// Errors: StatusError of kCancelled and of the stream; what torch throws.
void decode(const Model& model, UnitPass& pass, const torch::TensorOptions& weights,
            std::span<const std::vector<int64_t>> prompts, const DecodeOptions& options,
            const TakeToken& take);

}  // namespace smartinf::train
