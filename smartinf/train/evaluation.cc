// Validation and sampling.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"
#include "smartinf/train/random.h"
#include "smartinf/train/torch_trainer.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;
using torch::Tensor;

Result<double> TorchTrainer::mean_loss(const Windows& from, const std::string& what) {
  // Always the same windows, spread evenly over all.
  const uint64_t held = from.count();
  const uint64_t rows = options_.train.micro_batch;
  const uint64_t wanted = std::min(held, options_.train.validation_batches * rows);
  double sum = 0;
  double weights = 0;
  for (uint64_t first = 0; first < wanted; first += rows) {
    std::vector<uint64_t> windows;
    for (uint64_t i = first; i < std::min(first + rows, wanted); ++i) {
      windows.push_back(i * held / wanted);
    }
    SI_ASSIGN_OR_RETURN(const Batch batch, read_batch(from, windows));
    if (batch.targets == 0) continue;
    // In windows, as far as they count.
    const double weight = static_cast<double>(batch.targets) / options_.data.sequence;
    sum += pass_->loss(batch) * weight;
    weights += weight;
  }
  if (weights > 0) return sum / weights;
  return Status(ErrorCode::kFailedPrecondition,
                what + ": no token of the sequences that are looked at counts as a target",
                "Make train.validation_batches larger, or name other data");
}

std::string Validation::to_json(base::StepNumber step) const {
  nlohmann::ordered_json line{{"step", step}};
  if (loss) line["validation_loss"] = *loss;
  for (const Named& set : sets) line["evaluation_loss"][set.name] = set.loss;
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result<Validation> TorchTrainer::validate() {
  return guarded("validation", [&]() -> Result<Validation> {
    Validation made;
    if (corpus_.validation().count() > 0) {
      SI_ASSIGN_OR_RETURN(made.loss, mean_loss(corpus_.validation(), "the data held out"));
    }
    for (const Corpus::NamedWindows& set : corpus_.evaluation()) {
      SI_ASSIGN_OR_RETURN(const double loss,
                          mean_loss(set.windows, "data.evaluation: " + set.name));
      made.sets.push_back({set.name, loss});
    }
    // Of a run that was trained further the log says nothing new.
    const bool any = made.loss.has_value() || !made.sets.empty();
    if (any && step_ <= options_.train.steps) folder_.append_validation(step_, made.to_json(step_));
    return made;
  });
}

Result<std::optional<engine::CheckpointSummary>> TorchTrainer::keep_best(
    double loss, const engine::StateProgress& progress) {
  using Made = std::optional<engine::CheckpointSummary>;
  constexpr const char* kLoss = "validation_loss";
  if (!options_.train.keep_best || step_ > options_.train.steps) return Made();
  engine::CheckpointOptions options;
  options.folder = options_.checkpoint.folder + "/best";
  options.keep = 1;
  options.progress = progress;
  options.trainer = nlohmann::json{{kLoss, loss}}.dump();
  if (!best_loss_) {  // of an earlier start
    for (const engine::Checkpoint& there : engine::list_checkpoints(options.folder)) {
      const nlohmann::json json = base::parse_json(there.trainer);
      const auto found = json.is_object() ? json.find(kLoss) : json.end();
      const bool known = json.is_object() && found != json.end() && found->is_number();
      if (known && there.run.to_string() == record_.run) best_loss_ = found->get<double>();
    }
  }
  if (best_loss_ && *best_loss_ <= loss) return Made();
  SI_ASSIGN_OR_RETURN(auto made, keep_copy(std::move(options)));
  if (made) best_loss_ = loss;
  return made;
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
