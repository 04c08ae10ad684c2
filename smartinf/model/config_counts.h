// How large a model of transformers is, by its config.json alone: for planning, where nothing is
// loaded. It knows more architectures than config_json.h, which says what `smartinf train`
// computes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"
#include "smartinf/plan/training_memory.h"

namespace smartinf::model {

struct LayerCount {
  uint64_t parameters = 0;
  uint64_t active = 0;  // of matrices, those that a token is multiplied by
  uint64_t idle = 0;    // of experts, those that a token does not go through
  bool attends = true;
};

/// Counts of elements. Of an encoder and a decoder the layers of both.
struct ConfigCounts {
  std::string type;  // model_type
  uint64_t embedding = 0;
  std::vector<LayerCount> layers;
  uint64_t head = 0;     // at the end: final norm, and the head where it is not the embedding
  uint64_t largest = 0;  // parameter; transformers has all experts of a layer in one

  uint64_t width = 0;
  uint64_t heads = 0;
  uint64_t kv_heads = 0;
  uint64_t head_width = 0;
  uint64_t mlp_width = 0;   // width that a token goes through
  uint64_t vocabulary = 0;  // 0: no logits of tokens
  uint64_t context = 0;     // longest sequence
  bool gated = false;
  bool tied = false;

  uint64_t parameters() const;
};

/// The value that transformers' class of a model_type takes where config.json lacks the key; 0:
/// none, or what follows from other keys.
uint32_t class_default(std::string_view model_type, std::string_view key);

/// parameters: of a model_type that is not known here; the shape is then read under the usual
/// names. 0: it has to be known. `path` is for messages.
/// Errors: kCorrupt naming the key that is missing or wrong; kUnsupported for a model_type that is
/// not known, or is and `parameters` are given.
base::Result<ConfigCounts> count_config(const std::string& text, const std::string& path,
                                        uint64_t parameters = 0);

/// The part of an architecture that decides a training step's memory. tokens: of a micro batch.
plan::TrainingModel training_model(const Architecture& architecture, uint64_t tokens);

}  // namespace smartinf::model
