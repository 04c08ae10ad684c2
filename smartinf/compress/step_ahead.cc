#include "smartinf/compress/step_ahead.h"

#include <algorithm>
#include <cmath>

namespace smartinf::compress {

StepAheadWeights::StepAheadWeights(std::vector<MatrixLayout> matrices,
                                   const plan::ParameterSpace& space,
                                   std::span<const plan::Subgroup> subgroups)
    : matrices_(std::move(matrices)),
      subgroups_(subgroups.begin(), subgroups.end()),
      samples_(sample_count(matrices_)),
      weights_(subgroups_.size()),
      samples_missing_(matrices_.size()) {
  for (const MatrixLayout& matrix : matrices_)
    groups_.push_back(space.ranges()[matrix.range].group);
}

void StepAheadWeights::take(uint64_t first, std::span<const float> variances) {
  take_samples(matrices_, first, variances, samples_.data());
  roots_.matrix = ~size_t{0};
}

void StepAheadWeights::find_roots(size_t index) {
  if (roots_.matrix == index) return;
  roots_.matrix = index;
  const MatrixLayout& matrix = matrices_[index];
  const MatrixSamples samples{matrix};
  std::vector<float>& rows = roots_.rows;
  std::vector<float>& columns = roots_.columns;
  columns.assign(matrix.columns, 0.0f);
  for (uint64_t s = 0; s < samples.sampled_rows(); ++s) {
    const base::Bf16* row = samples_.data() + samples.of_row(s);
    for (uint64_t c = 0; c < matrix.columns; ++c) columns[c] += base::to_f32(row[c]);
  }
  rows.resize(matrix.rows);
  for (uint64_t r = 0; r < matrix.rows; ++r) {
    const base::Bf16* row = samples_.data() + samples.of_columns(r);
    rows[r] = 0;
    for (uint64_t s = 0; s < samples.sampled_columns(); ++s) rows[r] += base::to_f32(row[s]);
  }
  // The sum of the samples that are in both: rows * columns / both is exact where every variance is
  // such a product.
  float both = 0;
  for (uint64_t s = 0; s < samples.sampled_columns(); ++s) both += columns[samples.column(s)];
  if (!(both > 0)) {
    // Nothing is known of the columns: all are alike.
    both = static_cast<float>(samples.sampled_columns());
    std::fill(columns.begin(), columns.end(), 1.0f);
  }
  for (float& row : rows) row = std::sqrt(row / both);
  for (float& column : columns) column = std::sqrt(column);
}

void StepAheadWeights::step_in_matrix(const Step& step, size_t index, uint64_t first,
                                      uint64_t count, void* weights, base::DataType type) {
  find_roots(index);
  const MatrixLayout& matrix = matrices_[index];
  const MatrixPart part = part_of(matrix, first, count);
  const kernels::StepAhead& rate = step.rates[groups_[index]];
  uint64_t at = part.first;
  part.each_span([&](uint64_t row, uint64_t column, uint64_t some) {
    kernels::step_ahead(
        kernels::kernels(), rate, {step.residual + at, some}, roots_.rows[row],
        std::span(roots_.columns).subspan(column, some),
        static_cast<std::byte*>(weights) + (at - first) * base::data_type_bytes(type), type);
    at += some;
  });
}

void StepAheadWeights::step(const Step& step, uint64_t first, uint64_t count, void* weights,
                            base::DataType type) {
  for (const MatrixLayout& matrix : matrices_in(matrices_, first, count)) {
    step_in_matrix(step, index_of(matrix), first, count, weights, type);
  }
}

void StepAheadWeights::expect(std::span<const uint8_t> wanted) {
  roots_.matrix = ~size_t{0};
  std::fill(samples_missing_.begin(), samples_missing_.end(), 0);
  for (size_t i = 0; i < subgroups_.size(); ++i) {
    weights_[i] = {.at = nullptr, .wanted = wanted[i] != 0, .matrices_missing = 0};
    if (!weights_[i].wanted) continue;
    for (const MatrixLayout& matrix :
         matrices_in(matrices_, subgroups_[i].first, subgroups_[i].count)) {
      ++samples_missing_[index_of(matrix)];
      ++weights_[i].matrices_missing;
    }
  }
}

void StepAheadWeights::arrived(const Step& step, size_t subgroup, void* weights,
                               base::DataType type, const std::function<void(size_t)>& done) {
  const plan::Subgroup& own = subgroups_[subgroup];
  weights_[subgroup].at = weights;
  for (const MatrixLayout& matrix : matrices_in(matrices_, own.first, own.count)) {
    if (--samples_missing_[index_of(matrix)] > 0) continue;
    // All of the matrix has come: the subgroups that reach into it go ahead there.
    const auto end = std::partition_point(
        subgroups_.begin(), subgroups_.end(),
        [&](const plan::Subgroup& other) { return other.first < matrix.end(); });
    for (auto other = end; other != subgroups_.begin();) {
      --other;
      if (other->first + other->count <= matrix.first) break;
      Weights& its = weights_[static_cast<size_t>(other - subgroups_.begin())];
      if (!its.wanted) continue;
      if (its.at != nullptr) {
        step_in_matrix(step, index_of(matrix), other->first, other->count, its.at, type);
      }
      if (--its.matrices_missing == 0) done(static_cast<size_t>(other - subgroups_.begin()));
    }
  }
}

uint64_t StepAheadWeights::memory_bytes() const { return samples_.size() * sizeof(base::Bf16); }

}  // namespace smartinf::compress
