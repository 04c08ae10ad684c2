#pragma once

#include <optional>

#include <torch/types.h>

namespace smartinf::train {

/// torch::linear: x [..., K] times weight [N, K] transposed, plus bias [N]; gives [..., N]. On a
/// CPU without instructions for bf16 (has_fast_bf16) torch would multiply bf16 matrices several
/// times, without AVX-512 tens of times, more slowly than f32 ones; there linear_in_f32 does it,
/// but for one row without gradients, which is a matter of reading the weights.
torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight,
                     const std::optional<torch::Tensor>& bias = {});

/// The same, with its gradients: products of blocks that are copied to f32, sums in f32, rounded
/// once to the type of x. The copies take 12 MiB whatever the sizes.
torch::Tensor linear_in_f32(const torch::Tensor& x, const torch::Tensor& weight,
                            const std::optional<torch::Tensor>& bias = {});

}  // namespace smartinf::train
