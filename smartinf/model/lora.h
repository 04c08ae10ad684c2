// Low-rank adapters (Hu et al. 2021): beside a matrix W that stays as it is, the product of two
// small ones is trained: y = W x + alpha / rank B (A x). Names and files are those of Hugging
// Face's PEFT.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::model {

/// The recipe's [lora].
struct LoraOptions {
  uint32_t rank = 0;  // 0: no adapters; all weights are trained
  double alpha = 16;
  /// Names of modules, "q_proj" or a longer end of the name; kAllLinear: all that can have one.
  std::vector<std::string> targets = {"all-linear"};

  bool on() const { return rank != 0; }
  double scale() const { return alpha / rank; }
};
inline constexpr std::string_view kAllLinear = "all-linear";

/// A matrix that has an adapter. Its two parameters follow each other in the adapters' space: A,
/// [rank, in], and B, [out, rank].
struct LoraTarget {
  std::string module;   // "model.layers.0.self_attn.q_proj"
  Part part;            // the part that the matrix belongs to...
  uint64_t offset = 0;  // ...from this output on
  uint64_t in = 0;
  uint64_t out = 0;
  uint32_t layer = 0;
  uint64_t first_a = 0;  // elements of the adapters' space
  uint64_t first_b = 0;
};
/// In the order of the layers. Errors: kInvalidArgument for a target that names no matrix, with
/// those that there are.
base::Result<std::vector<LoraTarget>> lora_targets(const Architecture& architecture,
                                                   const LoraOptions& options);
base::Result<plan::ParameterSpace> lora_space(std::span<const LoraTarget> targets, uint32_t rank);

/// First values of elements [first, first + out.size()): A uniform within 1 / sqrt(in), B 0.
/// draw(element): uniform in [0, 1).
void fill_lora(std::span<const LoraTarget> targets, uint32_t rank, uint64_t first,
               std::span<float> out, double (*draw)(uint64_t seed, uint64_t element),
               uint64_t seed);

/// Adds scale B A to rows of the target's matrix as files have it, beginning with row `row`.
/// adapters: all of their space. transposed: the matrix is [in, out].
void add_lora(const LoraTarget& target, const LoraOptions& options, std::span<const float> adapters,
              bool transposed, uint64_t row, std::span<float> rows);

/// adapter_config.json. base: name or folder of the model.
std::string lora_config(const Architecture& architecture, const LoraOptions& options,
                        std::span<const LoraTarget> targets, const std::string& base);

}  // namespace smartinf::model
