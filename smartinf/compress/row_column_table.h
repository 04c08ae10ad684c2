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
  /// forms: borrowed.
  explicit RowColumnTable(std::span<const MatrixLayout> forms) : forms_(forms) {
    for (const MatrixLayout& form : forms) {
      at_.push_back(values_.size());
      values_.resize(values_.size() + form.rows + form.columns);
    }
  }

  RowColumnTable(const RowColumnTable&) = delete;
  RowColumnTable& operator=(const RowColumnTable&) = delete;

  std::span<T> rows(size_t form) { return {values_.data() + at_[form], forms_[form].rows}; }
  std::span<T> columns(size_t form) {
    return {values_.data() + at_[form] + forms_[form].rows, forms_[form].columns};
  }
  std::span<const T> rows(size_t form) const {
    return {values_.data() + at_[form], forms_[form].rows};
  }
  std::span<const T> columns(size_t form) const {
    return {values_.data() + at_[form] + forms_[form].rows, forms_[form].columns};
  }
  std::span<T> all() { return values_; }

  /// Behind what is in `out`: of every form that reaches into [first, first + count) those of the
  /// part's rows, then those of its columns in the part's order (MatrixPart).
  void append(uint64_t first, uint64_t count, std::vector<T>& out) const {
    for (const MatrixLayout& form : matrices_in(forms_, first, count)) {
      const auto index = static_cast<size_t>(&form - forms_.data());
      const MatrixPart part = part_of(form, first, count);
      const auto put = [&](std::span<const T> values) {
        out.insert(out.end(), values.begin(), values.end());
      };
      put(rows(index).subspan(part.first_row(), part.rows()));
      const uint64_t some = std::min(part.columns(), form.columns - part.first_column());
      put(columns(index).subspan(part.first_column(), some));
      put(columns(index).first(part.columns() - some));
    }
  }

  uint64_t memory_bytes() const { return values_.size() * sizeof(T); }

 private:
  std::span<const MatrixLayout> forms_;
  std::vector<size_t> at_;  // of each form, in values_
  std::vector<T> values_;
};

}  // namespace smartinf::compress
