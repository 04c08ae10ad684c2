#include "smartinf/compress/matrix_layout.h"

#include <algorithm>

namespace smartinf::compress {
namespace {

/// A matrix of those dimensions, joined so that rows and columns are fewest together.
struct Joined {
  uint64_t rows = 1;
  uint64_t columns = 1;
};
Joined join(std::span<const uint64_t> shape) {
  uint64_t count = 1;
  for (const uint64_t size : shape) count *= size;
  Joined best{1, count};
  uint64_t columns = 1;
  for (size_t i = shape.size(); i > 1; --i) {
    columns *= shape[i - 1];
    if (columns + count / columns < best.rows + best.columns) best = {count / columns, columns};
  }
  return best;
}

/// The matrix of the trailing dimensions alone, of which the range is a stack of as many as there
/// may be.
Joined matrix_of(const plan::ParameterRange& range) {
  for (size_t outer = range.shape.size(); outer-- > 1;) {
    const Joined matrix = join(std::span(range.shape).subspan(outer));
    const uint64_t factors = matrix.rows + matrix.columns;
    if (factors <= matrix.rows * matrix.columns / kStackedElements) return matrix;
  }
  return join(range.shape);
}

}  // namespace

std::vector<MatrixLayout> matrix_layouts(const plan::ParameterSpace& space) {
  std::vector<MatrixLayout> layouts;
  const auto add = [&](uint64_t first, uint64_t rows, uint64_t columns, size_t range) {
    layouts.push_back({first, rows, columns, sample_count(layouts), range});
  };
  for (size_t i = 0; i < space.ranges().size(); ++i) {
    const plan::ParameterRange& range = space.ranges()[i];
    const auto [rows, columns] = matrix_of(range);
    const uint64_t matrices = range.count / (rows * columns);
    const bool long_enough =
        rows == 1 ? columns <= kVectorColumns
                  : rows + columns <= std::max(kFewRows, rows * columns / kMatrixElements);
    if (long_enough) {
      for (uint64_t m = 0; m < matrices; ++m) {
        add(range.first + m * rows * columns, rows, columns, i);
      }
      continue;
    }
    const uint64_t cut = range.count / kCutColumns;
    const uint64_t rest = range.count % kCutColumns;
    if (cut > 0) add(range.first, cut, kCutColumns, i);
    if (rest > 0) add(range.first + cut * kCutColumns, 1, rest, i);
  }
  return layouts;
}

std::span<const MatrixLayout> matrices_in(std::span<const MatrixLayout> matrices, uint64_t first,
                                          uint64_t count) {
  if (count == 0) return {};
  const auto begin =
      std::partition_point(matrices.begin(), matrices.end(),
                           [&](const MatrixLayout& matrix) { return matrix.end() <= first; });
  const auto end = std::partition_point(begin, matrices.end(), [&](const MatrixLayout& matrix) {
    return matrix.first < first + count;
  });
  return {begin, end};
}

uint64_t factors_in(std::span<const MatrixLayout> matrices, uint64_t first, uint64_t count) {
  uint64_t sum = 0;
  for (const MatrixLayout& matrix : matrices_in(matrices, first, count)) {
    sum += part_of(matrix, first, count).factors();
  }
  return sum;
}

uint64_t sample_count(std::span<const MatrixLayout> matrices) {
  return matrices.empty() ? 0 : matrices.back().samples + MatrixSamples{matrices.back()}.count();
}

uint64_t samples_in(std::span<const MatrixLayout> matrices, uint64_t first, uint64_t count) {
  uint64_t sum = 0;
  for (const MatrixLayout& matrix : matrices_in(matrices, first, count)) {
    sum += MatrixSamples{matrix}.count_in(first, count);
  }
  return sum;
}

void take_samples(std::span<const MatrixLayout> matrices, uint64_t first,
                  std::span<const float> values, base::Bf16* samples) {
  for (const MatrixLayout& matrix : matrices_in(matrices, first, values.size())) {
    MatrixSamples{matrix}.each_in(
        first, values.size(), [&](uint64_t element, uint64_t sample, uint64_t n) {
          std::transform(values.data() + (element - first), values.data() + (element - first) + n,
                         samples + sample, base::to_bf16);
        });
  }
}

}  // namespace smartinf::compress
