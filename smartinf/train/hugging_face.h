// The JSON files beside the weights that transformers and tokenizers read.
#pragma once

#include <string>

#include "smartinf/base/float_formats.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// config.json of LlamaForCausalLM. model has its defaults and a vocabulary. `eos_token` < 0:
/// unknown.
std::string llama_config_json(const ModelOptions& model, uint32_t sequence, base::DataType type,
                              int64_t eos_token);
std::string generation_config_json(int64_t eos_token);
/// tokenizer.json whose tokens are the bytes of UTF-8 text, and <|endoftext|> for kByteSeparator.
std::string byte_tokenizer_json();
/// tokenizer_config.json; an empty `eos_token` is left out.
std::string tokenizer_config_json(uint32_t sequence, const std::string& eos_token);

inline constexpr const char* kByteSeparatorText = "<|endoftext|>";

}  // namespace smartinf::train
