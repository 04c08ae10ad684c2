// Kernels of products of a matrix with few rows, one set for each instruction set. The public side
// is row_product.h.
#pragma once

#include <cstddef>

#include "smartinf/base/float_formats.h"

namespace smartinf::kernels {

/// Some outputs of a product.
struct RowProductPart {
  const void* weights = nullptr;  // of the whole matrix, [outputs][inputs]
  bool transposed = false;        // [inputs][outputs]
  size_t outputs = 0;
  size_t inputs = 0;
  size_t first = 0;  // of the outputs that are made; transposed: a multiple of kColumnPart
  size_t count = 0;
  const float* x = nullptr;  // [rows][x_stride]; not transposed: as arrange() makes them
  size_t x_stride = 0;
  size_t rows = 0;
  float* y = nullptr;  // [rows][outputs]
};

inline constexpr size_t kRowBlock = 32;
inline constexpr size_t kColumnPart = 64;

struct RowProductKernels {
  /// Puts a row's inputs into the order in which multiply() of a matrix of this type that is not
  /// transposed takes them. Shapes: x: [n]; out: [n, rounded up to kRowBlock].
  void (*arrange)(base::DataType type, const float* x, float* out, size_t n);
  /// type: bf16 or f32. An output's bits follow from its weights and its row of x alone.
  void (*multiply)(base::DataType type, const RowProductPart& part);
};

/// One sum for each output, in order of the inputs.
const RowProductKernels& scalar_row_product();

}  // namespace smartinf::kernels
