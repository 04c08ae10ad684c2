#include "smartinf/train/decode.h"

#include <algorithm>

#include "smartinf/train/random.h"
#include "smartinf/train/status_error.h"

namespace smartinf::train {

using base::Status;
using torch::Tensor;

int64_t choose_token(const Tensor& logits_V, const Sampling& sampling, uint64_t draw) {
  const Tensor score_V = logits_V.to(torch::kCPU, torch::kFloat64);
  if (sampling.temperature == 0) return score_V.argmax().item<int64_t>();
  const int64_t all = score_V.size(0);
  const int64_t some = sampling.top_k == 0 ? all : std::min<int64_t>(sampling.top_k, all);
  const auto [likely_N, token_N] = (score_V / sampling.temperature).topk(some);
  Tensor share_N = torch::softmax(likely_N, 0);
  Tensor sum_N = share_N.cumsum(0);
  if (sampling.top_p < 1) {
    // The likeliest one always stays.
    const int64_t kept = (sum_N - share_N).lt(sampling.top_p).sum().item<int64_t>();
    sum_N = sum_N.narrow(0, 0, std::max<int64_t>(1, kept));
  }
  const int64_t last = sum_N.size(0) - 1;
  const double drawn = random_uniform(sampling.seed, draw) * sum_N[last].item<double>();
  const auto index = torch::searchsorted(sum_N, drawn, /*out_int32=*/false, /*right=*/true);
  return token_N[std::min(index.item<int64_t>(), last)].item<int64_t>();
}

void decode(const Model& model, UnitPass& pass, const torch::TensorOptions& weights,
            std::span<const std::vector<int64_t>> prompts, const DecodeOptions& options,
            const TakeToken& take) {
  struct Sequence {
    size_t prompt;
    uint64_t tokens;  // new ones that it may get
    uint64_t made;
    KeyValueCache cache;
    Tensor next_1T;  // that the cache does not have yet
  };
  std::vector<Sequence> sequences;
  const auto as_row = [&](const std::vector<int64_t>& tokens) {
    return torch::tensor(tokens, torch::kInt64).unsqueeze(0).to(weights.device());
  };
  for (size_t i = 0; i < prompts.size(); ++i) {
    const uint64_t before = prompts[i].size();
    if (before >= options.positions) continue;
    const uint64_t tokens = std::min(options.tokens, options.positions - before);
    if (tokens == 0) continue;
    sequences.push_back(
        {i, tokens, 0,
         KeyValueCache(model.architecture(), static_cast<int64_t>(before + tokens), weights),
         as_row(prompts[i])});
  }
  const auto go_on = [&] {
    if (options.stop.stop_requested()) {
      throw StatusError(Status(base::ErrorCode::kCancelled, "stopped"));
    }
  };
  while (!sequences.empty()) {
    std::vector<UnitPass::Continued> continued;
    for (Sequence& one : sequences) continued.push_back({one.next_1T, &one.cache});
    const std::vector<Tensor> logits_V = pass.next_logits(continued, go_on);
    for (size_t i = 0; i < sequences.size(); ++i) {
      Sequence& one = sequences[i];
      const int64_t token = choose_token(logits_V[i], options.sampling, one.made);
      take(one.prompt, token);
      const bool ends = std::ranges::find(options.end_tokens, token) != options.end_tokens.end();
      one.made = ends ? one.tokens : one.made + 1;
      one.next_1T = as_row({token});
    }
    std::erase_if(sequences, [](const Sequence& one) { return one.made == one.tokens; });
  }
}

}  // namespace smartinf::train
