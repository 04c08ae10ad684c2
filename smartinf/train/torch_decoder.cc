#include "smartinf/train/torch_decoder.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/train/guarded.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Status;
using torch::Tensor;

TorchDecoder::TorchDecoder(const Model& model, UnitPass& pass, const torch::TensorOptions& weights,
                           std::stop_token stop)
    : model_(model), pass_(pass), weights_(weights), stop_(std::move(stop)) {}

Tensor TorchDecoder::as_row(std::span<const int64_t> tokens) const {
  return torch::tensor(std::vector<int64_t>(tokens.begin(), tokens.end()), torch::kInt64)
      .unsqueeze(0)
      .to(weights_.device());
}

std::vector<Tensor> TorchDecoder::pass_over(std::span<Sequence* const> sequences) {
  std::vector<UnitPass::Continued> continued;
  for (Sequence* one : sequences) continued.push_back({one->next_1T, &one->cache});
  return pass_.next_logits(continued, [&] { throw_if_stopped(stop_); });
}

Status TorchDecoder::admit(std::span<const SequenceInput> sequences) {
  return guarded("begin sequences", [&]() -> Status {
    std::vector<std::unique_ptr<Sequence>> taken;
    for (const SequenceInput& input : sequences) {
      const auto is_it = [&](const auto& one) { return one->id == input.id; };
      if (std::ranges::any_of(sequences_, is_it) || std::ranges::any_of(taken, is_it)) {
        return Status(ErrorCode::kAlreadyExists, fmt::format("sequence {} is there", input.id));
      }
      TensorCache cache(model_.architecture(), static_cast<int64_t>(input.tokens_max), weights_);
      taken.push_back(std::make_unique<Sequence>(
          Sequence{input.id, std::move(cache), as_row(input.prompt),
                   std::vector<int64_t>(input.made.begin(), input.made.end())}));
    }
    for (;;) {
      std::vector<Sequence*> behind;
      for (const auto& one : taken) {
        if (!one->known.empty()) behind.push_back(one.get());
      }
      if (behind.empty()) break;
      pass_over(behind);
      for (Sequence* one : behind) {
        one->next_1T = as_row({one->known.data(), 1});
        one->known.erase(one->known.begin());
      }
    }
    std::ranges::move(taken, std::back_inserter(sequences_));
    return Status();
  });
}

Status TorchDecoder::step(const Choose& choose) {
  return guarded("continue sequences", [&]() -> Status {
    std::vector<Sequence*> all;
    for (const auto& one : sequences_) all.push_back(one.get());
    const std::vector<Tensor> logits_V = pass_over(all);
    for (size_t i = 0; i < all.size(); ++i) {
      const Tensor row_V = logits_V[i].to(torch::kCPU, torch::kFloat32).contiguous();
      const auto count = static_cast<size_t>(row_V.numel());
      const int64_t token = choose(all[i]->id, {row_V.const_data_ptr<float>(), count});
      all[i]->next_1T = as_row({&token, 1});
    }
    return Status();
  });
}

void TorchDecoder::release(SequenceId id) {
  std::erase_if(sequences_, [&](const auto& one) { return one->id == id; });
}

}  // namespace smartinf::train
