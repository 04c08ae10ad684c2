// Numbers of a space's matrices, one for each row and one for each column.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/compress/matrix_layout.h"

namespace smartinf::compress {

template <typename T>
class RowColumnTable {
 public:
  /// matrices: borrowed.
  explicit RowColumnTable(std::span<const MatrixLayout> matrices) : matrices_(matrices) {
    for (const MatrixLayout& matrix : matrices) {
      at_.push_back(values_.size());
      values_.resize(values_.size() + matrix.rows + matrix.columns);
    }
  }

  RowColumnTable(const RowColumnTable&) = delete;
  RowColumnTable& operator=(const RowColumnTable&) = delete;

  std::span<T> rows(size_t matrix) {
    return {values_.data() + at_[matrix], matrices_[matrix].rows};
  }
  std::span<T> columns(size_t matrix) {
    return {values_.data() + at_[matrix] + matrices_[matrix].rows, matrices_[matrix].columns};
  }
  std::span<const T> rows(size_t matrix) const {
    return {values_.data() + at_[matrix], matrices_[matrix].rows};
  }
  std::span<const T> columns(size_t matrix) const {
    return {values_.data() + at_[matrix] + matrices_[matrix].rows, matrices_[matrix].columns};
  }
  std::span<T> all() { return values_; }

  /// Behind what is in `out`: of every matrix that reaches into [first, first + count) those of the
  /// part's rows, then those of its columns in the part's order (MatrixPart).
  void append(uint64_t first, uint64_t count, std::vector<T>& out) const {
    for (const MatrixLayout& matrix : matrices_in(matrices_, first, count)) {
      const auto index = static_cast<size_t>(&matrix - matrices_.data());
      const MatrixPart part = part_of(matrix, first, count);
      const auto put = [&](std::span<const T> values) {
        out.insert(out.end(), values.begin(), values.end());
      };
      put(rows(index).subspan(part.first_row(), part.rows()));
      const uint64_t some = std::min(part.columns(), matrix.columns - part.first_column());
      put(columns(index).subspan(part.first_column(), some));
      put(columns(index).first(part.columns() - some));
    }
  }

  uint64_t memory_bytes() const { return values_.size() * sizeof(T); }

 private:
  std::span<const MatrixLayout> matrices_;
  std::vector<size_t> at_;  // of each matrix, in values_
  std::vector<T> values_;
};

}  // namespace smartinf::compress
