#include "smartinf/compress/second_moment_factors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "smartinf/kernels/feedback.h"

namespace smartinf::compress {
namespace {

/// Where the mean is NaN, it counts as the largest there is.
float factor(double mean) {
  return mean >= 0 ? static_cast<float>(mean) : std::numeric_limits<float>::infinity();
}

/// Raises what is not 0 to at least the largest over 2^29, so that the bytes of any part of them
/// (FactorRun) say the same of each.
void hold_together(std::span<float> means) {
  constexpr float kRange = 0x1p-29f;
  float largest = 0;
  for (const float mean : means) largest = std::isfinite(mean) ? std::max(largest, mean) : largest;
  for (float& mean : means) mean = mean > 0 ? std::max(mean, largest * kRange) : 0.0f;
}

}  // namespace

SecondMomentFactors::SecondMomentFactors(std::vector<MatrixLayout> matrices)
    : matrices_(std::move(matrices)), means_(matrices_), skipped_(matrices_.size()) {
  size_t partial = 0;
  for (size_t f = 0; f < matrices_.size(); ++f) {
    const MatrixLayout& matrix = matrices_[f];
    const uint64_t at_once = std::max<uint64_t>(1, kSectionElements / matrix.columns);
    for (uint64_t row = 0; row < matrix.rows; row += at_once) {
      sections_.push_back({f, row, std::min(at_once, matrix.rows - row), partial});
      partial += matrix.columns;
    }
  }
  partial_.resize(partial);
}

void SecondMomentFactors::find(const base::Bf16* gradient, float scale,
                               std::span<const plan::GroupSpan> skipped, base::ThreadTeam& team) {
  std::ranges::fill(means_.all(), 0.0f);
  std::fill(partial_.begin(), partial_.end(), 0.0f);
  std::fill(skipped_.begin(), skipped_.end(), uint8_t{0});
  for (const plan::GroupSpan& out : skipped) {
    for (const MatrixLayout& matrix : matrices_in(matrices_, out.first, out.count)) {
      skipped_[static_cast<size_t>(&matrix - matrices_.data())] = 1;
    }
  }
  team.run(sections_.size(), [&](uint32_t, size_t i) {
    if (skipped_[sections_[i].matrix] == 0) sum(sections_[i], gradient, scale);
  });
  for (size_t i = 0; i < sections_.size();) {
    const size_t matrix = sections_[i].matrix;
    size_t end = i + 1;
    while (end < sections_.size() && sections_[end].matrix == matrix) ++end;
    make_means(matrix, std::span(sections_).subspan(i, end - i));
    i = end;
  }
}

void SecondMomentFactors::sum(const Section& section, const base::Bf16* gradient, float scale) {
  const MatrixLayout& matrix = matrices_[section.matrix];
  kernels::add_matrix_squares(
      kernels::kernels(),
      {gradient + matrix.first + section.row * matrix.columns, section.rows * matrix.columns},
      scale, means_.rows(section.matrix).subspan(section.row, section.rows),
      std::span(partial_).subspan(section.columns_at, matrix.columns));
}

void SecondMomentFactors::make_means(size_t index, std::span<const Section> sections) {
  const MatrixLayout& matrix = matrices_[index];
  const auto rows = means_.rows(index);
  const auto columns = means_.columns(index);
  const double total = std::accumulate(rows.begin(), rows.end(), 0.0);
  const auto width = static_cast<double>(matrix.columns);
  for (float& row : rows) row = factor(row / width);
  const bool known = total > 0 && std::isfinite(total);
  for (size_t c = 0; c < columns.size(); ++c) {
    double column = 0;
    for (const Section& section : sections) column += partial_[section.columns_at + c];
    columns[c] = known ? factor(column * width / total) : 1.0f;
  }
  hold_together(rows);
  hold_together(columns);
}

void SecondMomentFactors::append(const plan::Subgroup& subgroup, RowColumnFactors& out) const {
  means_.append(subgroup.first, subgroup.count, out.values);
  append_factor_runs(matrices_, subgroup.first, subgroup.count, out.runs);
}

uint64_t SecondMomentFactors::memory_bytes() const {
  return means_.memory_bytes() + partial_.size() * sizeof(float);
}

}  // namespace smartinf::compress
