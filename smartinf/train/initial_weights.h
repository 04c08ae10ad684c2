// Master weights before the first step: random ones, or those of a folder of Hugging Face's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/model/architecture.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::train {

/// Random ones. A weight depends on the seed and its element only, not on how the space is cut:
/// norms are 1, biases 0, matrices normal with init_std, those that write into the residual stream
/// divided by sqrt(2 layers).
class InitialWeights {
 public:
  /// space: that of the architecture; outlives this.
  InitialWeights(const model::Architecture& architecture, const plan::ParameterSpace& space,
                 uint64_t seed);
  /// Puts elements [first, first + out.size()) into out.
  void fill(uint64_t first, std::span<float> out) const;

 private:
  const plan::ParameterSpace& space_;
  std::vector<model::Tensor> tensors_;  // one for each range of the space
  uint64_t seed_;
};

}  // namespace smartinf::train
