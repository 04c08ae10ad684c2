// Validation and sampling.
#include <algorithm>
#include <limits>

#include <nlohmann/json.hpp>

#include "smartinf/base/text.h"
#include "smartinf/train/decode.h"
#include "smartinf/train/torch_decoder.h"
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
  // Dealt to the ranks by turns. Each does as many passes as the others, which may have to bring it
  // weights: where there is nothing left to do, one over the first windows for nothing.
  struct Part {
    double loss = 0;
    double targets = 0;
  };
  const uint64_t batches = base::divide_up(wanted, rows);
  const uint64_t turns = base::divide_up(batches, replicas());
  std::vector<Part> parts(turns);
  for (uint64_t turn = 0; turn < turns; ++turn) {
    const uint64_t number = turn * replicas() + pipeline_.stages.replica(ranks_.rank());
    const uint64_t first = number < batches ? number * rows : 0;
    std::vector<uint64_t> windows;
    for (uint64_t i = first; i < std::min(first + rows, wanted); ++i) {
      windows.push_back(i * held / wanted);
    }
    SI_ASSIGN_OR_RETURN(const Batch batch, read_batch(from, windows));
    if (batch.targets == 0 && ranks_.alone()) continue;
    parts[turn] = {pass_->loss(batch), static_cast<double>(batch.targets)};
  }
  SI_ASSIGN_OR_RETURN(const std::vector<Part> all, ranks_.all<Part>(parts));
  double sum = 0;
  double weights = 0;
  for (uint64_t number = 0; number < batches; ++number) {
    const Part& part = all[rank_of_head(number % replicas()) * turns + number / replicas()];
    if (part.targets == 0) continue;
    // In windows, as far as they count.
    const double weight = part.targets / options_.data.sequence;
    sum += part.loss * weight;
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
  return together("validation", [&]() -> Result<Validation> {
    Validation made;
    if (corpus_.validation().count() > 0) {
      SI_ASSIGN_OR_RETURN(made.loss, mean_loss(corpus_.validation(), "the data held out"));
    }
    for (const Corpus::NamedWindows& set : corpus_.evaluation()) {
      SI_ASSIGN_OR_RETURN(const double loss,
                          mean_loss(set.windows, "data.evaluation: " + set.name));
      made.sets.push_back({set.name, loss});
    }
    // The log says nothing new about a run that was trained further.
    const bool any = made.loss.has_value() || !made.sets.empty();
    if (any && run_.step <= options_.train.steps)
      run_.folder.append_validation(run_.step, made.to_json(run_.step));
    return made;
  });
}

namespace {
constexpr const char* kLoss = "validation_loss";
}

/// Finds the best loss of an earlier start. Rank 0's folder counts.
Status TorchTrainer::find_best_loss() {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  double best = kNone;
  if (ranks_.first()) {
    for (const engine::Checkpoint& there :
         engine::list_checkpoints(options_.checkpoint.folder + "/best")) {
      const nlohmann::json json = base::parse_json(there.trainer);
      const auto found = json.is_object() ? json.find(kLoss) : json.end();
      const bool known = json.is_object() && found != json.end() && found->is_number();
      if (known && there.run.to_string() == run_.record.run) best = found->get<double>();
    }
  }
  SI_ASSIGN_OR_RETURN(const std::vector<double> all, ranks_.all<double>(std::span(&best, 1)));
  if (all.front() != kNone) best_loss_ = all.front();
  return Status();
}

Result<std::optional<engine::CheckpointSummary>> TorchTrainer::keep_best(
    double loss, const engine::StateProgress& progress) {
  using Made = std::optional<engine::CheckpointSummary>;
  if (!options_.train.keep_best || run_.step > options_.train.steps) return Made();
  engine::CheckpointOptions options;
  options.folder = options_.checkpoint.folder + "/best";
  options.keep = 1;
  options.progress = progress;
  options.trainer = nlohmann::json{{kLoss, loss}}.dump();
  if (!best_loss_) SI_RETURN_IF_ERROR(find_best_loss());
  if (best_loss_ && *best_loss_ <= loss) return Made();
  SI_ASSIGN_OR_RETURN(auto made, keep_copy(std::move(options)));
  if (made) best_loss_ = loss;
  return made;
}

Result<std::vector<std::vector<int64_t>>> TorchTrainer::first_ranks_prompts(
    std::span<const std::vector<int64_t>> prompts) const {
  const nlohmann::json mine = std::vector(prompts.begin(), prompts.end());
  SI_ASSIGN_OR_RETURN(const std::string text, ranks_.from_first(mine.dump()));
  return base::parse_json(text).get<std::vector<std::vector<int64_t>>>();
}

Result<std::vector<std::vector<int64_t>>> TorchTrainer::sample(
    std::span<const std::vector<int64_t>> prompts, std::stop_token stop) {
  using Sampled = std::vector<std::vector<int64_t>>;
  return together("sample", [&]() -> Result<Sampled> {
    const TrainOptions& train = options_.train;
    SI_ASSIGN_OR_RETURN(const Sampled of_first, first_ranks_prompts(prompts));
    // The others are needed only where they have to bring weights or rows of a table, or compute
    // their stages.
    const bool with_others =
        weights_.stream().streams() || pipeline_.on() || weights_.model().table() != nullptr;
    if (of_first.empty() || !(ranks_.first() || with_others)) return Sampled();
    DecodeOptions options;
    options.tokens = train.sample_tokens;
    options.positions = options_.data.sequence;
    options.sampling = {.temperature = train.sample_temperature, .seed = train.seed};
    options.end_tokens = source_.end_tokens;
    if (corpus_.bytes()) options.end_tokens.push_back(kByteSeparator);  // between files
    const std::vector<int64_t> end_tokens = options.end_tokens;
    if (ranks_.alone()) {
      options.stop = std::move(stop);
    } else if (with_others) {
      options.end_tokens.clear();  // as many passes on each rank, whatever it draws
    }
    Sampled made(of_first.size());
    TorchDecoder decoder(weights_.model(), *pass_, weights_.tensor_options(), options.stop);
    const auto take = [&](size_t prompt, int64_t token) { made[prompt].push_back(token); };
    SI_RETURN_IF_ERROR(decode(decoder, of_first, options, take));
    for (std::vector<int64_t>& tokens : made) {
      const auto end = std::ranges::find_first_of(tokens, end_tokens);
      if (end != tokens.end()) tokens.erase(end + 1, tokens.end());
    }
    return ranks_.first() ? made : Sampled();
  });
}

}  // namespace smartinf::train
