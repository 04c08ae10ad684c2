// The JSON files of a run's own tokenizer, as transformers and tokenizers read them.
#pragma once

#include <cstdint>
#include <string>

namespace smartinf::train {

/// `eos_token` < 0: unknown.
std::string generation_config_json(int64_t eos_token);
/// tokenizer.json whose tokens are the bytes of UTF-8 text, and <|endoftext|> for kByteSeparator.
std::string byte_tokenizer_json();
/// tokenizer_config.json; an empty `eos_token` is left out.
std::string tokenizer_config_json(uint32_t sequence, const std::string& eos_token);

inline constexpr const char* kByteSeparatorText = "<|endoftext|>";

}  // namespace smartinf::train
