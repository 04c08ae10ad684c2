// The model's parameters as a parameter space: which ranges, in which order, with which initial
// values. Names and shapes are those of LlamaForCausalLM in Hugging Face's transformers, so that an
// export is a cast and a copy.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/unit.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// Groups of the parameter space: weight decay acts on matrices only. Patterns of names make more
/// (parameter_groups.h).
inline constexpr uint32_t kMatrixGroup = 0;
inline constexpr uint32_t kVectorGroup = 1;
inline constexpr uint32_t kGroups = 2;

/// Embedding, layers from first to last, final norm, head (when untied). Within a layer, query, key
/// and value follow each other, and so do gate and up: each of the two is one matrix product.
/// `model` has its defaults filled in and a vocabulary.
base::Result<plan::ParameterSpace> make_parameter_space(const ModelOptions& model);

/// Those of plan::make_units.
std::vector<plan::Unit> model_units(const ModelOptions& model, const plan::ParameterSpace& space);

/// Initial master weights. A weight depends on the seed and its element only, not on how the space
/// is cut: norms are 1, matrices normal with init_std, those that write into the residual stream
/// divided by sqrt(2 layers).
class InitialWeights {
 public:
  InitialWeights(const ModelOptions& model, const plan::ParameterSpace& space, uint64_t seed);
  /// Puts elements [first, first + out.size()) into out.
  void fill(uint64_t first, std::span<float> out) const;

 private:
  const plan::ParameterSpace& space_;
  std::vector<double> std_;  // per range; 0: ones
  uint64_t seed_;
};

}  // namespace smartinf::train
