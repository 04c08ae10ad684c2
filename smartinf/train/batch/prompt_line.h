// A line of a batch of prompts: OpenAI's form of a request, or a plain object.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/train/sampling.h"

namespace smartinf::train {

/// Bytes of a line, at most: a conversation of some ten million words.
inline constexpr uint64_t kPromptLineBytesMax = uint64_t{64} << 20;

/// What a line does not say.
struct PromptDefaults {
  uint64_t tokens = 128;
  Sampling sampling;
};

struct PromptLine {
  /// Form of the line, and of its answer.
  enum class Form : uint8_t { kPlain, kChat, kCompletion };
  Form form = Form::kPlain;
  uint64_t number = 0;   // of the line in its file, from 1
  std::string id;        // as JSON; without one in the line its number
  std::string model;     // as the line names it: nothing follows from it
  std::string error;     // why there is no prompt; empty: there is one
  std::string text;      // one of these three is the prompt
  std::string messages;  // a list as JSON: role and content of each, both texts
  std::vector<int64_t> tokens;
  uint64_t tokens_max = 0;  // new ones
  /// The seed that the line names, or one that follows from the default and the id.
  Sampling sampling;
  std::vector<std::string> stop;  // texts before which an answer ends

  /// Text becomes tokens for it, or tokens text.
  bool needs_text() const { return error.empty() && (tokens.empty() || form != Form::kPlain); }
};

/// What cannot be used, unknown fields among it, is in the line's error. Fields that only say what
/// holds here anyway (n 1, stream false, null) are taken.
PromptLine read_prompt_line(std::string_view text, uint64_t number, const PromptDefaults& defaults);

}  // namespace smartinf::train
