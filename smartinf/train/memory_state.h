// The file in which optimizer.where = "memory" keeps its state. Reading it needs no torch.
#pragma once

#include <array>
#include <span>
#include <string>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/model/safetensors.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::train {

/// Mapped from the run's folder; spans live as long as the object.
class MemoryState {
 public:
  static constexpr size_t kPlanes = 3;  // master, momentum, variance

  static std::string path(const std::string& run);
  /// Errors: kNotFound; kMismatch when it is another model's; kCorrupt.
  static base::Result<MemoryState> open(const std::string& run, const plan::ParameterSpace& space);
  static base::Status save(const std::string& run, const plan::ParameterSpace& space,
                           base::StepNumber step, const std::string& client_metadata,
                           const std::array<std::span<const float>, kPlanes>& planes);

  base::StepNumber step() const { return step_; }
  const std::string& client_metadata() const { return client_metadata_; }
  std::span<const float> plane(size_t index) const { return planes_[index]; }

 private:
  explicit MemoryState(model::SafetensorsFile file) : file_(std::move(file)) {}
  model::SafetensorsFile file_;
  base::StepNumber step_ = 0;
  std::string client_metadata_;
  std::array<std::span<const float>, kPlanes> planes_;
};

}  // namespace smartinf::train
