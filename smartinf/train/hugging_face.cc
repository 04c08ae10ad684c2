#include "smartinf/train/hugging_face.h"

#include <nlohmann/json.hpp>

#include "smartinf/train/corpus.h"

namespace smartinf::train {

using Json = nlohmann::ordered_json;

namespace {

// The character that stands for a byte in byte-level tokenizers: itself where it is printable, else
// the next free one from U+0100 on. Source: GPT-2's encoder, bytes_to_unicode.
std::string byte_character(uint32_t byte) {
  const auto printable = [](uint32_t b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
  };
  uint32_t code = byte;
  if (!printable(byte)) {
    code = 256;
    for (uint32_t b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 128) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
}

}  // namespace

std::string generation_config_json(int64_t eos_token) {
  Json config = {{"do_sample", true}, {"temperature", 0.7}};
  if (eos_token >= 0) {
    config["bos_token_id"] = config["eos_token_id"] = config["pad_token_id"] = eos_token;
  }
  return config.dump(2) + "\n";
}

std::string byte_tokenizer_json() {
  Json vocabulary = Json::object();
  for (uint32_t byte = 0; byte < kByteVocabulary; ++byte) {
    if (byte != kByteSeparator) vocabulary[byte_character(byte)] = byte;
  }
  const Json bytes = {{"type", "ByteLevel"},
                      {"add_prefix_space", false},
                      {"trim_offsets", true},
                      {"use_regex", false}};
  const Json separator = {{"id", kByteSeparator}, {"content", kByteSeparatorText},
                          {"single_word", false}, {"lstrip", false},
                          {"rstrip", false},      {"normalized", false},
                          {"special", true}};
  const Json tokenizer = {{"version", "1.0"},
                          {"truncation", nullptr},
                          {"padding", nullptr},
                          {"added_tokens", Json::array({separator})},
                          {"normalizer", nullptr},
                          {"pre_tokenizer", bytes},
                          {"post_processor", nullptr},
                          {"decoder", bytes},
                          {"model",
                           {{"type", "BPE"},
                            {"dropout", nullptr},
                            {"unk_token", nullptr},
                            {"continuing_subword_prefix", nullptr},
                            {"end_of_word_suffix", nullptr},
                            {"fuse_unk", false},
                            {"byte_fallback", false},
                            {"vocab", vocabulary},
                            {"merges", Json::array()}}}};
  return tokenizer.dump(1) + "\n";
}

std::string tokenizer_config_json(uint32_t sequence, const std::string& eos_token) {
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"model_max_length", sequence},
                 {"clean_up_tokenization_spaces", false}};
  if (!eos_token.empty()) config["bos_token"] = config["eos_token"] = eos_token;
  return config.dump(2) + "\n";
}

}  // namespace smartinf::train
