// Description of a decoder-only transformer, one for all families, made of shared blocks. Names and
// shapes of its tensors are those of Hugging Face's transformers, so that import and export are
// casts and copies. What the blocks compute is in train/model.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/status.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/unit.h"

namespace smartinf::model {

/// config.json's model_type.
enum class Family : uint8_t {
  kLlama,
  kMistral,
  kQwen2,
  kQwen3,
  kGemma2,
  kGemma3,
  kGpt2,
  kMixtral,
  kQwen3Moe
};
inline constexpr std::array<std::string_view, 9> kFamilyNames{
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"};
constexpr base::EnumNames enum_names(Family) { return kFamilyNames; }

/// kRmsPlusOne: RMSNorm whose factor is 1 + weight, computed in f32.
enum class Norm : uint8_t { kRms, kRmsPlusOne, kLayer };

enum class Activation : uint8_t { kSilu, kGelu, kGeluTanh };
inline constexpr std::array<std::string_view, 3> kActivationNames{"silu", "gelu",
                                                                  "gelu_pytorch_tanh"};
constexpr base::EnumNames enum_names(Activation) { return kActivationNames; }

/// Rotary positions (Su et al. 2021), and how they are stretched beyond the length that a model was
/// trained with. Source of each: transformers' modeling_rope_utils.
struct Rope {
  enum class Scaling : uint8_t { kNone, kLinear, kLlama3, kYarn };
  double base = 10000;
  Scaling scaling = Scaling::kNone;
  double factor = 1;
  double original_positions = 0;          // llama3, yarn
  double low_frequency_factor = 1;        // llama3
  double high_frequency_factor = 4;       // llama3
  double beta_fast = 32, beta_slow = 1;   // yarn
  double mscale = 0, mscale_all_dim = 0;  // yarn; 0: not given
  double attention_factor = 0;            // yarn; 0: follows from factor and mscale
  bool truncate = true;                   // yarn
};

/// Frequencies of a head of `head_width` elements: one for each pair, radians per position, as
/// transformers computes them in f32.
std::vector<float> rope_frequencies(const Rope& rope, uint32_t head_width);
/// The factor of sines and cosines.
double rope_magnitude(const Rope& rope);

struct Architecture {
  Family family = Family::kLlama;
  uint32_t layers = 0;
  uint32_t width = 0;  // of the residual stream
  uint32_t heads = 0;  // of queries
  uint32_t kv_heads = 0;
  uint32_t head_width = 0;
  uint32_t mlp_width = 0;
  uint32_t vocabulary = 0;
  uint32_t positions = 0;  // longest sequence that config.json names; learned ones end there

  Norm norm = Norm::kRms;
  double norm_eps = 1e-5;
  bool norm_after = false;  // results of attention and feed-forward are normalized as well
  Activation activation = Activation::kSilu;
  bool gated = true;  // feed-forward: down(activation(gate x) * up x), else down(activation(up x))
  bool qkv_bias = false;
  bool output_bias = false;  // of attention's last product
  bool mlp_bias = false;
  bool query_key_norm = false;
  bool transposed = false;  // matrices are [in, out] (GPT-2's Conv1D)

  bool learned_positions = false;  // else rotary ones
  Rope rope;                       // of layers that see everything
  Rope window_rope;                // of layers with a window
  std::vector<uint32_t> windows;   // by layer: last tokens that it sees, itself too; 0: all
  double attention_scale = 0;      // of queries times keys; 0: 1 / sqrt(head_width)
  double attention_softcap = 0;    // 0: none
  double logit_softcap = 0;        // 0: none
  bool scaled_embedding = false;   // by sqrt(width)
  int64_t padding_token = -1;      // whose embedding, where it is read, has no gradient; < 0: none
  bool tied_head = true;           // the head's matrix is the embedding
  bool table_embedding = false;    // its rows are a table on devices, and not in the space

  uint32_t experts = 0;  // 0: one feed-forward part for all tokens
  uint32_t experts_per_token = 0;
  bool normalized_experts = true;  // weights of the chosen experts sum to 1

  double init_std = 0.02;  // of random initial matrices

  uint32_t query_width() const { return heads * head_width; }
  uint32_t kv_width() const { return kv_heads * head_width; }
  uint64_t table_elements() const { return table_embedding ? uint64_t{vocabulary} * width : 0; }
  /// The same model with its embedding in the space, where it comes first.
  Architecture whole() const {
    Architecture model = *this;
    model.table_embedding = false;
    return model;
  }
};

/// The purpose of a parameter. Neighbouring tensors of one part are used as one, joined along their
/// first extent: query, key and value are one matrix product, and so are gate and up.
enum class Part : uint8_t {
  kEmbedding,
  kPositions,
  kAttentionNorm,
  kAttentionNormBias,
  kQkv,
  kQkvBias,
  kQueryNorm,
  kKeyNorm,
  kOutput,
  kOutputBias,
  kAttentionPostNorm,
  kMlpNorm,
  kMlpNormBias,
  kRouter,
  kGateUp,
  kGateUpBias,
  kDown,
  kDownBias,
  kMlpPostNorm,
  kFinalNorm,
  kFinalNormBias,
  kHead,
};

struct Tensor {
  Part part;
  std::string name;
  std::vector<uint64_t> shape;
  double init_std = 0;  // 0: all elements are init_value
  float init_value = 0;
};
/// All of them in the order of the parameter space: embedding, layers from first to last, final
/// norm, head where it is not tied.
std::vector<Tensor> tensors_of(const Architecture& architecture);

/// Groups of the parameter space: weight decay acts on matrices only. Patterns of names make more
/// (train/parameter_groups.h).
inline constexpr uint32_t kMatrixGroup = 0;
inline constexpr uint32_t kVectorGroup = 1;
inline constexpr uint32_t kGroups = 2;
base::Result<plan::ParameterSpace> make_parameter_space(const Architecture& architecture);

/// The units that plan::make_units makes of it.
std::vector<plan::Unit> make_units(const Architecture& architecture);

}  // namespace smartinf::model
