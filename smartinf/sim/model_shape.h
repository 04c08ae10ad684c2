// Models as the simulator sees them: shapes, and what follows from shapes alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"
#include "smartinf/model/config_counts.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/training_memory.h"

namespace smartinf::sim {

/// A transformer by its dimensions. Counts of elements, not bytes.
struct ModelShape {
  std::string name;
  std::string type;  // model_type, as in config.json
  uint64_t layers = 0;
  uint64_t hidden = 0;
  uint64_t heads = 0;
  uint64_t kv_heads = 0;      // equal to heads but for grouped-query attention
  uint64_t head_size = 0;     // hidden / heads but for models that say otherwise
  uint64_t feed_forward = 0;  // inner width
  uint64_t vocabulary = 0;    // 0: no token embedding (vision)
  uint64_t positions = 0;     // learned position embeddings; 0 for rotary or ALiBi
  bool gated = false;         // SwiGLU: three feed-forward matrices instead of two
  bool tied = true;           // the head is the embedding
  bool biases = true;         // matrices and norms have biases
  /// Counts of a config.json, exact; without them the dimensions above say what there is.
  std::optional<model::ConfigCounts> counts;
  /// As `smartinf train` takes it from a folder (model.from); else what train_lacks says.
  std::optional<model::Architecture> architecture;
  base::Status train_lacks;
  std::string folder;  // config.json's, where weights are beside it
  uint64_t sequence = 1024;
  uint64_t batch = 4;
  bool whole = true;  // false: a stage, which may have no layer

  uint64_t tokens() const { return sequence * batch; }
  uint64_t layer_parameters(uint64_t layer = 0) const;
  uint64_t embedding_parameters() const;  // at the start: tokens and positions
  uint64_t head_parameters() const;       // at the end: final norm, and the head when untied
  uint64_t parameters() const;
  /// Parameters of matrices that a token of a layer is multiplied by, in the mean: not all experts.
  double active_parameters() const;
  /// With fewer layers.
  ModelShape with_layers(uint64_t fewer) const;
  /// A stage of a pipeline: the model's units from `begin` to `end`. For simulate_step alone.
  ModelShape stage(uint32_t begin, uint32_t end) const;
  /// In the order and shapes in which `smartinf train` has them. For models of check_model().
  plan::ParameterSpace space() const;

  /// Multiply-adds times two of one layer's forward over all tokens: matrices, and attention over
  /// the full sequence (the paper's stack does not skip the masked half).
  double layer_forward_flops() const;
  double head_forward_flops() const;
  /// Bytes of activations that one layer's forward leaves behind when nothing is recomputed,
  /// 16-bit: tokens x hidden x (34 + 5 x heads x sequence / hidden). A measure of how much the
  /// steps between matrix products move through GPU memory. Source: Korthikanti et al. 2022,
  /// "Reducing Activation Recomputation", section 4.1.
  double layer_activation_bytes() const;
  /// The same for plan::training_memory. To `smartinf train` query, key and value are one
  /// parameter, and so are gate and up.
  plan::TrainingModel training_model(
      plan::TrainingProgram program = plan::TrainingProgram::kPython) const;
  std::vector<plan::Unit> units() const;
};

/// Names of all presets, e.g. "gpt2-4.0B".
std::vector<std::string_view> model_preset_names();
/// Errors: kNotFound naming the nearest preset.
base::Result<ModelShape> model_preset(std::string_view name);

/// From a Hugging Face config.json, by model::count_config. parameters: of a model_type that is not
/// known; 0: it has to be. Errors: count_config's, and check_model's.
base::Result<ModelShape> model_from_hf_config(const std::string& json_text,
                                              const std::string& origin, uint64_t parameters = 0);

/// Counts and architecture anew, after a dimension of a preset or a shape was changed. Errors:
/// kInvalidArgument for dimensions that cannot be.
base::Status complete_model(ModelShape& model);

/// Errors: kInvalidArgument naming the first dimension that is zero, does not divide or is so large
/// that counts would overflow.
base::Status check_model(const ModelShape& model);

}  // namespace smartinf::sim
