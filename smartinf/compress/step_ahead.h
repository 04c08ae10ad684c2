// Step-ahead weights (kernels::step_ahead): estimates the second moment from samples that the
// devices send, and moves the weights of a matrix when all samples of it have come.
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

/// The second moment of an element is estimated as a row factor times a column factor, because it
/// is mostly an average of such products (SecondMomentFactors). Nothing of earlier steps is used:
/// the same state gives the same weights, on any devices. Threads: one at a time, except samples().
class StepAheadWeights {
 public:
  StepAheadWeights(std::vector<MatrixLayout> matrices, const plan::ParameterSpace& space,
                   std::span<const plan::Subgroup> subgroups);

  /// Where devices put their samples (csd::SubgroupUpdate::samples_out).
  base::Bf16* samples() { return samples_.data(); }
  /// Samples of variances that were read. first: in the space.
  void take(uint64_t first, std::span<const float> variances);

  /// A step that weights are moved by: the residual of the whole space; the scalars of each group.
  struct Step {
    const base::Bf16* residual = nullptr;
    std::span<const kernels::StepAhead> rates;
  };
  /// Moves weights, given as the devices have them, in matrices of which all samples have come.
  /// weights: [count] of type.
  void step(const Step& step, uint64_t first, uint64_t count, void* weights, base::DataType type);

  /// The next update is of the subgroups with wanted[i] != 0; its samples are still to come.
  void expect(std::span<const uint8_t> wanted);
  /// A subgroup's new weights, or null, and samples have come. Moves the weights of each matrix
  /// that is now complete, and calls done(subgroup) for each subgroup whose weights are ready.
  void arrived(const Step& step, size_t subgroup, void* weights, base::DataType type,
               const std::function<void(size_t)>& done);

  uint64_t memory_bytes() const;

 private:
  struct Weights {
    void* at = nullptr;
    bool wanted = false;
    size_t matrices_missing = 0;
  };
  /// Row and column factors, whose product is the root of the matrix's second moment.
  struct Roots {
    size_t matrix = ~size_t{0};
    std::vector<float> rows;
    std::vector<float> columns;
  };
  void find_roots(size_t matrix);
  /// Moves the weights of [first, first + count), which lie in the matrix. weights: of `first`.
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
