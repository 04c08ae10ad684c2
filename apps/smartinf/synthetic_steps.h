// Optimizer steps without a model: parameters without names, gradients out of a small buffer,
// weights into memory. What the step benchmarks have in common.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/engine/updater.h"

namespace smartinf::apps {

/// Rows and columns of the matrices that synthetic parameters are.
inline constexpr uint64_t kMatrixColumns = 4096;
/// So many, the last ones in a part of a matrix or a vector. Errors: kInvalidArgument.
base::Result<plan::ParameterSpace> synthetic_space(uint64_t params);

/// Takes the bf16 weights of such matrices ahead by a residual, row by row, on this thread.
void step_rows_ahead(std::span<const base::Bf16> residual, std::byte* weights);

struct StepTimes {
  double gradient_s = 0;  // gradients put, with the norm
  double update_s = 0;    // from the last gradient to the committed step
  double weights_s = 0;   // of it, until all new weights are up
};

class SyntheticSteps {
 public:
  /// Errors: kInvalidArgument, kOutOfMemory (weights do not fit).
  static base::Result<std::unique_ptr<SyntheticSteps>> make(uint64_t params,
                                                            base::DataType gradient_type,
                                                            base::DataType weights_type);

  const plan::ParameterSpace& space() const { return space_; }
  /// Values given as the gradient of every engine::kGradientCutElements parameters.
  const std::byte* gradient() const { return gradient_.data(); }
  /// Writes values like those of a model's weights; for a fresh updater.
  base::Status initialize(engine::Updater& updater) const;
  /// One whole step.
  base::Result<StepTimes> step(engine::Updater& updater);

  /// The parts of one, for who computes between them. Gradients of [first, first + count); `first`
  /// is a multiple of engine::kGradientCutElements.
  base::Status put_gradients(engine::Updater& updater, uint64_t first, uint64_t count) const;
  engine::UpdateOptions update_options() const;
  engine::WeightsSink weights_sink();
  base::DataType weights_type() const { return weights_type_; }

 private:
  SyntheticSteps() = default;

  plan::ParameterSpace space_;
  base::DataType gradient_type_ = base::DataType::kBf16;
  base::DataType weights_type_ = base::DataType::kBf16;
  base::AlignedBuffer weights_;
  base::AlignedBuffer gradient_;  // one cut, given again and again
};

}  // namespace smartinf::apps
