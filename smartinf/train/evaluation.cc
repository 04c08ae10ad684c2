// Validation and sampling.
#include <algorithm>

#include "smartinf/train/random.h"
#include "smartinf/train/torch_trainer.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

Result<double> TorchTrainer::validation_loss() {
  return guarded("validation", [&]() -> Result<double> {
    if (corpus_.validation().count() == 0) {
      return Status(ErrorCode::kNotFound, "no data is held out for validation",
                    "Set data.validation_share or data.validation_paths");
    }
    // Always the same windows, spread evenly over what is held out.
    const uint64_t held = (corpus_.validation().count() - 1) / options_.data.sequence;
    const uint64_t rows = options_.train.micro_batch;
    const uint64_t wanted = std::min(held, options_.train.validation_batches * rows);
    double sum = 0;
    for (uint64_t first = 0; first < wanted; first += rows) {
      std::vector<uint64_t> windows;
      for (uint64_t i = first; i < std::min(first + rows, wanted); ++i) {
        windows.push_back(i * held / wanted);
      }
      SI_ASSIGN_OR_RETURN(const Batch batch, read_windows(corpus_.validation(), windows));
      sum += pass_->loss(batch) * static_cast<double>(windows.size());
    }
    const double loss = sum / static_cast<double>(wanted);
    // Of a run that was trained further the log says nothing new.
    if (step_ <= options_.train.steps) folder_.append_validation(step_, loss);
    return loss;
  });
}

Result<std::string> TorchTrainer::sample() {
  return guarded("sample", [&]() -> Result<std::string> {
    const TrainOptions& train = options_.train;
    std::string text;
    std::vector<int64_t> tokens;
    if (corpus_.bytes()) {
      for (const char c : train.sample_prompt) tokens.push_back(static_cast<unsigned char>(c));
      text = train.sample_prompt;
    }
    if (tokens.empty()) tokens.push_back(corpus_.bytes() ? int64_t{kByteSeparator} : 0);
    for (uint32_t i = 0; i < train.sample_tokens; ++i) {
      const size_t seen = std::min<size_t>(tokens.size(), options_.data.sequence);
      const Tensor context_BT =
          torch::tensor(
              std::vector<int64_t>(tokens.end() - static_cast<std::ptrdiff_t>(seen), tokens.end()))
              .unsqueeze(0)
              .to(accelerator_);
      const Tensor last_V = pass_->next_logits(context_BT)[0].to(torch::kCPU, torch::kFloat64);
      int64_t next = last_V.argmax().item<int64_t>();
      if (train.sample_temperature > 0) {
        const Tensor chance_V = torch::softmax(last_V / train.sample_temperature, 0).cumsum(0);
        const double drawn = random_uniform(train.seed, i);
        next = std::min(torch::searchsorted(chance_V, drawn).item<int64_t>(), chance_V.size(0) - 1);
      }
      tokens.push_back(next);
      if (!corpus_.bytes()) {
        text += fmt::format("{} ", next);
      } else if (next == kByteSeparator) {
        break;  // the end of a file
      } else {
        text += static_cast<char>(next);
      }
    }
    return text;
  });
}

}  // namespace smartinf::train
