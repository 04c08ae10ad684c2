// The squares of a step's gradient, factored into one number for each row and column of a matrix:
// what devices age the variance with where they do not see the gradient whole.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/compress/message.h"
#include "smartinf/compress/row_column_table.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::compress {

/// A square is about its row's mean times its column's mean relative to the mean of all (Shazeer
/// and Stern 2018). They are of whole matrices, so that they do not depend on how the space is cut
/// into subgroups. Threads: one at a time, but for append().
class SecondMomentFactors {
 public:
  explicit SecondMomentFactors(std::vector<MatrixLayout> matrices);

  /// Finds the factors of scale * gradient, by a team of threads; the result does not depend on how
  /// many. gradient: of the whole space. Matrices that reach into skipped spans have squares of 0.
  void find(const base::Bf16* gradient, float scale, std::span<const plan::GroupSpan> skipped,
            base::ThreadTeam& team);
  /// Appends the factors that a message of the subgroup carries to what is in `out`.
  void append(const plan::Subgroup& subgroup, RowColumnFactors& out) const;

  std::span<const MatrixLayout> matrices() const { return matrices_; }
  uint64_t memory_bytes() const;

 private:
  /// Rows that are summed by one thread, the columns' sums apart from those of other sections.
  struct Section {
    size_t matrix = 0;
    uint64_t row = 0;
    uint64_t rows = 0;
    size_t columns_at = 0;  // in partial_
  };
  static constexpr uint64_t kSectionElements = uint64_t{1} << 22;
  void sum(const Section& section, const base::Bf16* gradient, float scale);
  void make_means(size_t matrix, std::span<const Section> sections);

  const std::vector<MatrixLayout> matrices_;
  std::vector<Section> sections_;  // in order
  RowColumnTable<float> means_;    // of rows; of columns, relative; and sums before
  std::vector<float> partial_;     // sums of columns, by section
  std::vector<uint8_t> skipped_;   // by matrix
};

}  // namespace smartinf::compress
