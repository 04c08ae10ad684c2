#include "smartinf/train/decode.h"

#include <algorithm>
#include <map>

namespace smartinf::train {

using base::Status;

namespace {

struct Left {
  uint64_t tokens = 0;  // new ones that the prompt may get
  uint64_t made = 0;
};

}  // namespace

Status decode(SequenceDecoder& decoder, std::span<const std::vector<int64_t>> prompts,
              const DecodeOptions& options, const TakeToken& take) {
  std::map<SequenceId, Left> left;  // by the number of the prompt
  std::vector<SequenceInput> inputs;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const uint64_t before = prompts[i].size();
    if (before >= options.positions || options.tokens == 0) continue;
    const uint64_t tokens = std::min(options.tokens, options.positions - before);
    left[i] = {tokens};
    inputs.push_back({.id = i, .prompt = prompts[i], .made = {}, .tokens_max = before + tokens});
  }
  const auto choose = [&](SequenceId id, std::span<const float> logits) {
    Left& one = left[id];
    const int64_t token = choose_token(logits, options.sampling, one.made);
    take(id, token);
    const bool ends = std::ranges::find(options.end_tokens, token) != options.end_tokens.end();
    one.made = ends ? one.tokens : one.made + 1;
    return token;
  };
  Status status = inputs.empty() ? Status() : decoder.admit(inputs);
  while (status.ok() && !left.empty()) {
    status = decoder.step(choose);
    std::erase_if(left, [&](const auto& one) {
      const bool ends = one.second.made == one.second.tokens;
      if (ends) decoder.release(one.first);
      return ends;
    });
  }
  for (const auto& [id, one] : left) decoder.release(id);
  return status;
}

}  // namespace smartinf::train
