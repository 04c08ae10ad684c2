// A model's tokens as text: bytes as they are, or the model's tokenizer through the user's Python.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "smartinf/base/status.h"
#include "smartinf/train/model_source.h"

#include "apps/smartinf/python_script.h"

namespace smartinf::apps {

/// Threads: one caller.
class TextCodec {
 public:
  /// Errors: kNotFound for a model without a tokenizer whose tokens are not bytes, and where there
  /// is no Python.
  static base::Result<TextCodec> open(const train::TextForm& form);

  // Errors of all: kInvalidArgument for what the tokenizer or its template refuses;
  // kFailedPrecondition where the tokenizer does not run any more: where the error does not say
  // why, Python has said it.
  /// chat: as the user's words in the model's chat template.
  base::Result<std::vector<int64_t>> encode(const std::string& text, bool chat = false);
  /// A list of messages in the model's chat template.
  base::Result<std::vector<int64_t>> encode_messages(const nlohmann::json& messages);
  /// Without special tokens. Where the last character is not complete yet it may be U+FFFD.
  base::Result<std::string> decode(std::span<const int64_t> tokens);
  /// The text that `made` adds behind a prompt: as much of the whole text as begins where the
  /// prompt's ends, for some tokenizers write a token otherwise where a text begins.
  base::Result<std::string> continuation(std::span<const int64_t> prompt,
                                         std::span<const int64_t> made);

 private:
  explicit TextCodec(std::optional<PythonScript> script) : script_(std::move(script)) {}
  base::Result<nlohmann::json> ask(const nlohmann::json& request);

  std::optional<PythonScript> script_;  // none: bytes
};

}  // namespace smartinf::apps
