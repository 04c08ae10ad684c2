// Validation and sampling.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"
#include "smartinf/train/decode.h"
#include "smartinf/train/scalar_type.h"
#include "smartinf/train/torch_trainer.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

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

Result<std::vector<std::vector<int64_t>>> TorchTrainer::sample(
    std::span<const std::vector<int64_t>> prompts, std::stop_token stop) {
  using Sampled = std::vector<std::vector<int64_t>>;
  return guarded("sample", [&]() -> Result<Sampled> {
    const TrainOptions& train = options_.train;
    DecodeOptions options;
    options.tokens = train.sample_tokens;
    options.positions = options_.data.sequence;
    options.sampling = {.temperature = train.sample_temperature, .seed = train.seed};
    options.end_tokens = source_.end_tokens;
    if (corpus_.bytes()) options.end_tokens.push_back(kByteSeparator);  // between files
    options.stop = std::move(stop);
    Sampled made(prompts.size());
    decode(*model_, *pass_, torch::dtype(scalar_type(weights_type_)).device(accelerator_), prompts,
           options, [&](size_t prompt, int64_t token) { made[prompt].push_back(token); });
    return made;
  });
}

}  // namespace smartinf::train
