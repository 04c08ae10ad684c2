// Operations on single rows between the products of a decode step, as torch has them: in f32, each
// result rounded to the model's type (round_to). A row's bits follow from the row alone.
#pragma once

#include <span>

#include "smartinf/base/float_formats.h"

namespace smartinf::kernels {

// Shapes: rows: [n] f32, all of a call as long as each other. type: bf16 or f32. Threads: pure.
// Errors: none.

/// out = in / sqrt(mean of squares + eps) * factor.
void rms_norm(base::DataType type, std::span<const float> factor, float eps,
              std::span<const float> in, std::span<float> out);
/// out = (in - mean) / sqrt(variance + eps) * factor + bias.
void layer_norm(base::DataType type, std::span<const float> factor, std::span<const float> bias,
                float eps, std::span<const float> in, std::span<float> out);
/// Turns the halves of each head against each other, by angles that all heads share.
/// Shapes: cosine, sine: [d]; row: [heads][d].
void rotate(base::DataType type, std::span<const float> cosine, std::span<const float> sine,
            std::span<float> row);

void silu(base::DataType type, std::span<float> row);
void gelu(base::DataType type, std::span<float> row);
void gelu_tanh(base::DataType type, std::span<float> row);
/// cap tanh(row / cap), in torch's three steps.
void soft_cap(base::DataType type, float cap, std::span<float> row);

void add(base::DataType type, std::span<const float> more, std::span<float> row);
void multiply(base::DataType type, std::span<const float> by, std::span<float> row);
void multiply(base::DataType type, float by, std::span<float> row);

}  // namespace smartinf::kernels
