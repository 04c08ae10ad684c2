// Weights that step ahead by what compression keeps (kernels::step_ahead): finds the variances that
// takes from samples of the devices', and waits until those of a whole matrix are there.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/compress/matrix_layout.h"
#include "smartinf/kernels/feedback.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::compress {

/// A variance is about its row's times its column's, for it is mostly made of squares that are
/// (FactoredSquares). Nothing is remembered of earlier steps: the same state gives the same
/// weights, on whatever devices it lies. Threads: one at a time, but for samples().
class StepAheadWeights {
 public:
  StepAheadWeights(std::vector<MatrixLayout> matrices, const plan::ParameterSpace& space,
                   std::span<const plan::Subgroup> subgroups);

  /// Where devices put what they sample (csd::SubgroupUpdate::samples_out).
  base::Bf16* samples() { return samples_.data(); }
  /// Samples of variances that were read. first: in the space.
  void take(uint64_t first, std::span<const float> variances);

  /// What weights step by: kept, of the whole space; rates by group.
  struct Step {
    const base::Bf16* residual = nullptr;
    std::span<const kernels::StepAhead> rates;
  };
  /// Takes weights that are as the devices have them to where training is, where all samples are
  /// there. weights: [count] of type.
  void step(const Step& step, uint64_t first, uint64_t count, void* weights, base::DataType type);

  /// The next update is of the subgroups with wanted[i] != 0; its samples are still to come.
  void expect(std::span<const uint8_t> wanted);
  /// A subgroup's new weights, or null, and samples have come. Steps where all samples that it
  /// takes are there now, and calls done(subgroup) for each whose weights are ready.
  void arrived(const Step& step, size_t subgroup, void* weights, base::DataType type,
               const std::function<void(size_t)>& done);

  uint64_t memory_bytes() const;

 private:
  struct Weights {
    void* at = nullptr;
    bool wanted = false;
    size_t matrices_missing = 0;
  };
  /// Whose product is the root of the variances of the matrix.
  struct Roots {
    size_t matrix = ~size_t{0};
    std::vector<float> rows;
    std::vector<float> columns;
  };
  void find_roots(size_t matrix);
  /// What lies in [first, first + count) of the matrix. weights: of `first`.
  void step_in_matrix(const Step& step, size_t matrix, uint64_t first, uint64_t count,
                      void* weights, base::DataType type);
  size_t index_of(const MatrixLayout& matrix) const {
    return static_cast<size_t>(&matrix - matrices_.data());
  }

  const std::vector<MatrixLayout> matrices_;
  const std::vector<plan::Subgroup> subgroups_;
  std::vector<uint32_t> groups_;  // by matrix
  std::vector<base::Bf16> samples_;
  std::vector<Weights> weights_;         // by subgroup
  std::vector<size_t> samples_missing_;  // by matrix: subgroups that are still to come
  Roots roots_;                          // of the matrix at hand
};

}  // namespace smartinf::compress
