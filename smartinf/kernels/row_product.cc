#include "smartinf/kernels/row_product.h"

#include <algorithm>
#include <array>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/row_product_kernels.h"

namespace smartinf::kernels {
namespace {

using base::DataType;

/// Rows of one pass over a part of the matrix; the part stays near the processor for the next.
constexpr size_t kRowsAtOnce = 16;
/// Outputs that a thread makes at a time; of transposed matrices more lie in a row.
constexpr size_t kPartOutputsMax = 128;
static_assert(kPartOutputsMax / 2 % kColumnPart == 0);
/// Products that are not worth waking another thread for, in multiplications.
constexpr size_t kSmall = size_t{1} << 15;

float value_of(const RowProductPart& part, DataType type, size_t output, size_t input) {
  const size_t at = part.transposed ? input * part.outputs + output : output * part.inputs + input;
  if (type == DataType::kF32) return static_cast<const float*>(part.weights)[at];
  return base::to_f32(static_cast<const base::Bf16*>(part.weights)[at]);
}

void arrange(DataType /*type*/, const float* x, float* out, size_t n) { std::copy_n(x, n, out); }

void multiply(DataType type, const RowProductPart& part) {
  for (size_t r = 0; r < part.rows; ++r) {
    for (size_t n = part.first; n < part.first + part.count; ++n) {
      float sum = 0;
      for (size_t k = 0; k < part.inputs; ++k) {
        sum += part.x[r * part.x_stride + k] * value_of(part, type, n, k);
      }
      part.y[r * part.outputs + n] = sum;
    }
  }
}

/// Adds the bias to a part's outputs and rounds them.
void finish(const KernelTable& table, const RowMatrix& matrix, const RowProductPart& part) {
  std::array<float, kPartOutputsMax> bias = {};
  if (matrix.bias != nullptr) {
    const uint64_t bytes = part.first * base::data_type_bytes(matrix.type);
    table.cast_to_f32(static_cast<const std::byte*>(matrix.bias) + bytes, matrix.type, bias.data(),
                      part.count);
  }
  for (size_t r = 0; r < part.rows; ++r) {
    const std::span<float> y(part.y + r * part.outputs + part.first, part.count);
    for (size_t n = 0; matrix.bias != nullptr && n < y.size(); ++n) y[n] += bias[n];
    round_to(matrix.type, y);
  }
}

}  // namespace

void round_to(DataType type, std::span<float> values) {
  SI_CHECK(type != DataType::kF16, "rows are bf16 or f32");
  if (type == DataType::kF32) return;
  for (float& value : values) value = base::to_f32(base::to_bf16(value));
}

const RowProductKernels& scalar_row_product() {
  static constexpr RowProductKernels kKernels{.arrange = arrange, .multiply = multiply};
  return kKernels;
}

void RowProduct::run(const RowMatrix& matrix, std::span<const float> x, std::span<float> y) {
  SI_CHECK(matrix.type != DataType::kF16, "matrices are bf16 or f32");
  SI_CHECK(matrix.inputs > 0 && matrix.outputs > 0 && x.size() % matrix.inputs == 0,
           "whole rows of the matrix's inputs");
  const size_t rows = x.size() / matrix.inputs;
  SI_CHECK(y.size() == rows * matrix.outputs, "as many rows of outputs");
  const RowProductKernels& kernels = table_.tiles().row_product;
  const size_t stride =
      matrix.transposed ? matrix.inputs : base::round_up(matrix.inputs, kRowBlock);
  RowProductPart all{.weights = matrix.weights,
                     .transposed = matrix.transposed,
                     .outputs = matrix.outputs,
                     .inputs = matrix.inputs,
                     .x = x.data(),
                     .x_stride = stride,
                     .rows = rows,
                     .y = y.data()};
  if (!matrix.transposed) {
    arranged_.resize(rows * stride);
    for (size_t r = 0; r < rows; ++r) {
      kernels.arrange(matrix.type, x.data() + r * matrix.inputs, arranged_.data() + r * stride,
                      matrix.inputs);
    }
    all.x = arranged_.data();
  }
  const size_t step = matrix.transposed ? kPartOutputsMax : kPartOutputsMax / 2;
  const size_t parts = base::divide_up(matrix.outputs, step);
  const auto make = [&](uint32_t /*worker*/, size_t index) {
    for (size_t from = 0; from < rows; from += kRowsAtOnce) {
      RowProductPart part = all;
      part.first = index * step;
      part.count = std::min(step, matrix.outputs - part.first);
      part.rows = std::min(kRowsAtOnce, rows - from);
      part.x += from * stride;
      part.y += from * matrix.outputs;
      kernels.multiply(matrix.type, part);
      finish(table_, matrix, part);
    }
  };
  if (rows * matrix.outputs * matrix.inputs < kSmall) {
    for (size_t i = 0; i < parts; ++i) make(0, i);
  } else {
    team_.run(parts, make);
  }
}

}  // namespace smartinf::kernels
