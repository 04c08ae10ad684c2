// How a space's parameters lie in rows and columns. Squares and variances are estimated from one
// number for each row and each column, in place of one for each element.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::compress {

/// A span of elements as whole rows.
struct MatrixLayout {
  uint64_t first = 0;  // element in the space
  uint64_t rows = 0;
  uint64_t columns = 0;
  uint64_t samples = 0;  // of the matrices before it (MatrixSamples)
  size_t range = 0;      // of the space, to which all of it belongs

  uint64_t count() const { return rows * columns; }
  uint64_t end() const { return first + count(); }
};

inline constexpr uint64_t kVectorColumns = 4096;
inline constexpr uint64_t kCutColumns = 1024;
inline constexpr uint64_t kStackedElements = 256;  // to a row or column, at least
inline constexpr uint64_t kMatrixElements = 64;    // likewise, of large matrices
inline constexpr uint64_t kFewRows = 8192;         // and columns, of the others
/// The matrices of all ranges, in order, without gaps. A range of two dimensions is the matrix that
/// it is. One with more is a stack of matrices (of experts, say) where each has kStackedElements to
/// every row and column of its; within a matrix neighbouring dimensions are joined so that rows and
/// columns are fewest. A vector of up to kVectorColumns is one row; a longer one, and a large
/// matrix that is so narrow that its rows would say too little, is cut into rows of kCutColumns
/// and one of what is left.
std::vector<MatrixLayout> matrix_layouts(const plan::ParameterSpace& space);

/// The matrices that reach into [first, first + count). matrices: in order, without gaps.
std::span<const MatrixLayout> matrices_in(std::span<const MatrixLayout> matrices, uint64_t first,
                                          uint64_t count);

/// A part of a matrix: the rows that it touches, of which the first and last may be cut, and the
/// columns that occur in it, from that of its first element on and round the end.
struct MatrixPart {
  MatrixLayout matrix;
  uint64_t first = 0;  // element in the space
  uint64_t count = 0;

  uint64_t first_row() const { return (first - matrix.first) / matrix.columns; }
  uint64_t rows() const {
    return (first + count - 1 - matrix.first) / matrix.columns + 1 - first_row();
  }
  uint64_t first_column() const { return (first - matrix.first) % matrix.columns; }
  uint64_t columns() const { return std::min(matrix.columns, count); }
  /// Numbers that describe it: one for each row, then one for each column.
  uint64_t factors() const { return rows() + columns(); }

  /// act(row, column, count): what the part has of each row, by the matrix's own rows and columns.
  template <typename Act>
  void each_span(const Act& act) const {
    uint64_t row = first_row();
    uint64_t column = first_column();
    for (uint64_t left = count; left > 0; ++row, column = 0) {
      const uint64_t some = std::min(left, matrix.columns - column);
      act(row, column, some);
      left -= some;
    }
  }

  /// act(row, column, count): the same by the part's own: the row counts from its first, the column
  /// is the position among its columns.
  template <typename Act>
  void each_row(const Act& act) const {
    each_span([&](uint64_t row, uint64_t column, uint64_t left) {
      while (left > 0) {
        const uint64_t position = column >= first_column()
                                      ? column - first_column()
                                      : column + matrix.columns - first_column();
        // Round the end of the part's columns: there the next position is 0.
        const uint64_t some = std::min(left, columns() - position);
        act(row - first_row(), position, some);
        left -= some;
        column += some;
      }
    });
  }
};

/// Returns the part of a matrix that lies in [first, first + count); the matrix reaches into it.
inline MatrixPart part_of(const MatrixLayout& matrix, uint64_t first, uint64_t count) {
  const uint64_t from = std::max(first, matrix.first);
  return {matrix, from, std::min(first + count, matrix.end()) - from};
}

/// Factors of all parts of [first, first + count), in order.
uint64_t factors_in(std::span<const MatrixLayout> matrices, uint64_t first, uint64_t count);

/// Samples of a matrix, from which a plane that is about a product of row and column is estimated:
/// some rows whole, and of every row some columns.
struct MatrixSamples {
  MatrixLayout matrix;

  /// So many of n, spread evenly.
  static uint64_t some_of(uint64_t n) { return std::min(n, 16 + n / 256); }
  static uint64_t place(uint64_t sample, uint64_t n) {
    return (2 * sample + 1) * n / (2 * some_of(n));
  }
  uint64_t sampled_rows() const { return some_of(matrix.rows); }
  uint64_t sampled_columns() const { return some_of(matrix.columns); }
  uint64_t row(uint64_t sample) const { return place(sample, matrix.rows); }
  uint64_t column(uint64_t sample) const { return place(sample, matrix.columns); }

  /// First the sampled rows, then for every row its sampled columns. Places among the samples of
  /// all matrices: from matrix.samples on.
  uint64_t count() const {
    return sampled_rows() * matrix.columns + matrix.rows * sampled_columns();
  }
  uint64_t of_row(uint64_t sample) const { return matrix.samples + sample * matrix.columns; }
  uint64_t of_columns(uint64_t row) const {
    return matrix.samples + sampled_rows() * matrix.columns + row * sampled_columns();
  }

  /// act(element, sample, count): samples of [first, first + count), by element of the space; so
  /// many neighbours of both.
  template <typename Act>
  void each_in(uint64_t first, uint64_t count, const Act& act) const {
    const MatrixPart part = part_of(matrix, first, count);
    const uint64_t last_row = part.first_row() + part.rows();
    for (uint64_t s = first_sample(part.first_row(), matrix.rows);
         s < sampled_rows() && row(s) < last_row; ++s) {
      const uint64_t begin = matrix.first + row(s) * matrix.columns;
      const uint64_t from = std::max(begin, part.first);
      const uint64_t to = std::min(begin + matrix.columns, part.first + part.count);
      act(from, of_row(s) + from - begin, to - from);
    }
    for (uint64_t s = 0; s < sampled_columns(); ++s) {
      uint64_t element = matrix.first + part.first_row() * matrix.columns + column(s);
      for (uint64_t r = part.first_row(); r < last_row; ++r, element += matrix.columns) {
        if (element < part.first || element >= part.first + part.count) continue;
        act(element, of_columns(r) + s, uint64_t{1});
      }
    }
  }
  /// How many those are.
  uint64_t count_in(uint64_t first, uint64_t count) const {
    const MatrixPart part = part_of(matrix, first, count);
    return up_to(part.first + part.count - matrix.first) - up_to(part.first - matrix.first);
  }

 private:
  /// Samples among the matrix's first elements.
  uint64_t up_to(uint64_t elements) const {
    const uint64_t whole = elements / matrix.columns;
    const uint64_t rest = elements % matrix.columns;
    const uint64_t rows_before =
        whole == matrix.rows ? sampled_rows() : first_sample(whole, matrix.rows);
    const uint64_t in_rest = rest > 0 ? first_sample(rest, matrix.columns) : 0;
    const bool cut_row_sampled =
        rest > 0 && rows_before < sampled_rows() && row(rows_before) == whole;
    return rows_before * matrix.columns + (cut_row_sampled ? rest : 0) + whole * sampled_columns() +
           in_rest;
  }
  /// The first sample whose place is not before `at`.
  static uint64_t first_sample(uint64_t at, uint64_t n) {
    uint64_t sample = at * some_of(n) / n;
    while (sample > 0 && place(sample - 1, n) >= at) --sample;
    while (sample < some_of(n) && place(sample, n) < at) ++sample;
    return sample;
  }
};

/// Samples of all matrices.
uint64_t sample_count(std::span<const MatrixLayout> matrices);
/// Number of samples in [first, first + count).
uint64_t samples_in(std::span<const MatrixLayout> matrices, uint64_t first, uint64_t count);
/// Rounds to their places in `samples` those of a span of the space that begins at `first`.
/// Shapes: values: [n]; samples: [sample_count(matrices)]. Threads: safe on disjoint spans.
void take_samples(std::span<const MatrixLayout> matrices, uint64_t first,
                  std::span<const float> values, base::Bf16* samples);

}  // namespace smartinf::compress
