// In which units the signs of a step are told: what a compressed message says of each row and
// column of a matrix besides its squares, so that elements whose gradients are small are sent too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/engine/form_table.h"
#include "smartinf/plan/matrix_forms.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::engine {

/// An element's unit is the fourth root of its variance: between its gradient as it is, with which
/// the small ones of a block would wait for ever, and its step, with which the large ones, that
/// matter most, would wait as long as all others. docs/smartcomp.md has what was measured.
/// Threads: one at a time, but for append() and of_elements().
class SignLevels {
 public:
  explicit SignLevels(std::vector<plan::MatrixForm> forms);

  std::span<const plan::MatrixForm> forms() const { return forms_; }
  /// roots: of the form's variances, a product of row and column. Shapes: rows: [form.rows],
  /// columns: [form.columns].
  void set(size_t form, std::span<const float> rows, std::span<const float> columns);

  /// What a message of the subgroup says of them, behind what is in `out`.
  void append(const plan::Subgroup& subgroup, std::vector<int8_t>& out) const;
  /// Of elements from `first` on, as a device finds them (kernels::add_levels). Shapes: out:
  /// [count].
  void of_elements(uint64_t first, std::span<int16_t> out) const;

  uint64_t memory_bytes() const { return levels_.memory_bytes(); }

 private:
  const std::vector<plan::MatrixForm> forms_;
  FormTable<int8_t> levels_;
};

}  // namespace smartinf::engine
