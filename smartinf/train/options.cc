#include "smartinf/train/options.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include <fmt/format.h>

#include "smartinf/base/text.h"
#include "smartinf/base/units.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/parameter_groups.h"

namespace smartinf::train {
namespace {

using base::ErrorCode;
using base::Status;

// Far above any model in sight, and low enough that no product of two overflows 64 bits.
constexpr uint32_t kWidthMax = 1u << 20;
constexpr uint32_t kLayersMax = 1u << 14;
constexpr uint32_t kSequenceMax = 1u << 24;
constexpr uint64_t kStepsMax = uint64_t{1} << 40;

Status wrong(std::string_view key, std::string_view why, std::string advice) {
  return Status(ErrorCode::kInvalidArgument, fmt::format("{} {}", key, why), std::move(advice));
}

// Also false for a NaN.
template <typename T>
Status within(std::string_view key, T value, std::type_identity_t<T> least,
              std::type_identity_t<T> most) {
  if (value >= least && value <= most) return Status();
  return wrong(key, fmt::format("is {}", value),
               fmt::format("Choose a value from {} to {}", least, most));
}

Status positive(std::string_view key, double value) {
  if (std::isfinite(value) && value > 0) return Status();
  return wrong(key, fmt::format("is {}", value), "Choose a value above 0");
}

}  // namespace

ModelOptions with_defaults(ModelOptions model) {
  if (model.kv_heads == 0) model.kv_heads = model.heads;
  if (model.mlp_width == 0) {
    const uint64_t width = base::round_up(base::divide_up(uint64_t{model.width} * 8, 3), 64);
    model.mlp_width = static_cast<uint32_t>(width);
  }
  return model;
}

namespace {

/// Beside model.from no size may be given.
Status validate_from(const ModelOptions& model) {
  const ModelOptions plain;
  const auto given = [](std::string_view key) {
    return wrong(key, "is given beside model.from, whose config.json says what the model is",
                 "Leave it out");
  };
  if (model.layers != plain.layers) return given("model.layers");
  if (model.width != plain.width) return given("model.width");
  if (model.heads != plain.heads) return given("model.heads");
  if (model.kv_heads != plain.kv_heads) return given("model.kv_heads");
  if (model.mlp_width != plain.mlp_width) return given("model.mlp_width");
  if (model.vocabulary != plain.vocabulary) return given("model.vocabulary");
  if (model.rope_base != plain.rope_base) return given("model.rope_base");
  if (model.norm_eps != plain.norm_eps) return given("model.norm_eps");
  if (model.init_std != plain.init_std) return given("model.init_std");
  if (model.tied_head != plain.tied_head) return given("model.tied_head");
  return Status();
}

}  // namespace

Status validate(const ModelOptions& given) {
  if (!given.from.empty()) return validate_from(given);
  SI_RETURN_IF_ERROR(within("model.layers", given.layers, 1, kLayersMax));
  SI_RETURN_IF_ERROR(within("model.width", given.width, 1, kWidthMax));
  SI_RETURN_IF_ERROR(within("model.heads", given.heads, 1, given.width));
  SI_RETURN_IF_ERROR(within("model.mlp_width", given.mlp_width, 0, kWidthMax * 4));
  SI_RETURN_IF_ERROR(within("model.vocabulary", given.vocabulary, 0, kWidthMax * 16));
  const ModelOptions model = with_defaults(given);
  if (model.width % model.heads != 0) {
    return wrong(
        "model.heads",
        fmt::format("is {}, which does not divide model.width ({})", model.heads, model.width),
        "Choose heads that divide the width");
  }
  if (model.head_width() % 2 != 0) {
    return wrong("model.heads",
                 fmt::format("is {}: heads of {} elements cannot be rotated in pairs", model.heads,
                             model.head_width()),
                 "Choose heads so that model.width / model.heads is even");
  }
  if (model.kv_heads > model.heads || model.heads % model.kv_heads != 0) {
    return wrong(
        "model.kv_heads",
        fmt::format("is {}, which does not divide model.heads ({})", model.kv_heads, model.heads),
        "Choose kv_heads that divide the heads");
  }
  SI_RETURN_IF_ERROR(positive("model.rope_base", model.rope_base));
  SI_RETURN_IF_ERROR(positive("model.norm_eps", model.norm_eps));
  return positive("model.init_std", model.init_std);
}

Status validate(const model::LoraOptions& lora) {
  SI_RETURN_IF_ERROR(within("lora.rank", lora.rank, 0, 1u << 16));
  if (lora.on() && lora.targets.empty()) {
    return wrong(
        "lora.targets", "is empty",
        fmt::format("Name matrices, e.g. [\"q_proj\", \"v_proj\"], or \"{}\"", model::kAllLinear));
  }
  return positive("lora.alpha", lora.alpha);
}

base::Result<std::vector<EvaluationSet>> evaluation_sets(const DataOptions& data) {
  std::vector<EvaluationSet> sets;
  for (const std::string& text : data.evaluation) {
    const size_t middle = text.find('=');
    const auto trimmed = [](std::string part) {
      part.erase(0, part.find_first_not_of(' '));
      part.erase(part.find_last_not_of(' ') + 1);
      return part;
    };
    const std::string name = trimmed(text.substr(0, middle));
    const std::string path = middle == std::string::npos ? "" : trimmed(text.substr(middle + 1));
    if (name.empty() || path.empty() || !base::printable(name)) {
      return wrong("data.evaluation", "has an entry that is not NAME = PATH",
                   "For example: data.evaluation = [\"chat = data/chat.safetensors\"]");
    }
    const auto same = std::ranges::find(sets, name, &EvaluationSet::name);
    EvaluationSet& set = same != sets.end() ? *same : sets.emplace_back(EvaluationSet{name, {}});
    set.paths.push_back(path);
  }
  return sets;
}

Status validate(const DataOptions& data) {
  if (data.paths.empty()) {
    return wrong("data.paths", "is empty",
                 fmt::format("Name text files, folders or token files, or \"{}\"", kPythonStdlib));
  }
  SI_RETURN_IF_ERROR(evaluation_sets(data).status());
  SI_RETURN_IF_ERROR(within("data.sequence", data.sequence, 1, kSequenceMax));
  return within("data.validation_share", data.validation_share, 0.0, 0.9);
}

Status validate(const TrainOptions& train) {
  SI_RETURN_IF_ERROR(within("train.epochs", train.epochs, 0.0, 1e9));
  if (train.epochs > 0 && train.steps > 0) {
    return wrong("train.epochs",
                 fmt::format("is {}, but train.steps is given too ({})", train.epochs, train.steps),
                 "Leave one of the two out, or set it to 0");
  }
  if (train.epochs == 0) {
    SI_RETURN_IF_ERROR(within("train.steps", train.steps, 1, kStepsMax));
  }
  SI_RETURN_IF_ERROR(within("train.log_every", train.log_every, 1, uint64_t{1} << 40));
  SI_RETURN_IF_ERROR(within("train.micro_batch", train.micro_batch, 1, 1u << 20));
  SI_RETURN_IF_ERROR(within("train.accumulation", train.accumulation, 1, 1u << 20));
  SI_RETURN_IF_ERROR(positive("train.lr", train.lr));
  SI_RETURN_IF_ERROR(within("train.lr_floor", train.lr_floor, 0.0, 1.0));
  SI_RETURN_IF_ERROR(within("train.decay_share", train.decay_share, 0.0, 1.0));
  SI_RETURN_IF_ERROR(within("train.warmup_steps", train.warmup_steps, 0, uint64_t{1} << 40));
  SI_RETURN_IF_ERROR(within("train.weight_decay", train.weight_decay, 0.0, 1e6));
  SI_RETURN_IF_ERROR(within("train.clip_norm", train.clip_norm, 0.0, 1e30));
  SI_RETURN_IF_ERROR(within("train.threads", train.threads, 0, 4096));
  SI_RETURN_IF_ERROR(within("train.validation_batches", train.validation_batches, 1, 1u << 20));
  SI_RETURN_IF_ERROR(
      within("train.layer_stats_every", train.layer_stats_every, 0, uint64_t{1} << 40));
  SI_RETURN_IF_ERROR(within("train.save_every", train.save_every, 1, uint64_t{1} << 40));
  SI_RETURN_IF_ERROR(within("train.sample_temperature", train.sample_temperature, 0.0, 100.0));
  if (train.accelerator != "auto" && train.accelerator != "cpu" && train.accelerator != "cuda") {
    return wrong("train.accelerator", fmt::format("is \"{}\"", train.accelerator),
                 "Choose \"auto\", \"cpu\" or \"cuda\"");
  }
  if (train.run.empty()) {
    return wrong("train.run", "is empty", "Name a folder for the run, e.g. runs/mine");
  }
  return Status();
}

Status validate(const CheckpointSchedule& checkpoint) {
  SI_RETURN_IF_ERROR(within("checkpoint.every", checkpoint.every, 0, uint64_t{1} << 40));
  return within("checkpoint.keep", checkpoint.keep, 0, uint64_t{1} << 40);
}

uint64_t compressed_bytes(const StageCompression& options, uint64_t rows, uint64_t width) {
  if (options.form == GradientForm::kLowRank) {
    const uint64_t rank = std::min({uint64_t{options.rank}, rows, width});
    return sizeof(uint16_t) * rank * (rows + width);
  }
  const uint64_t bits = options.form == GradientForm::kInt8 ? 8 : 4;
  return base::divide_up(rows * width, kCodedBlock) * (sizeof(float) + kCodedBlock * bits / 8);
}

Status validate(const RankOptions& ranks) {
  SI_RETURN_IF_ERROR(within("ranks.pipeline", ranks.pipeline, 0, 1024));
  const StageCompression& compression = ranks.compression;
  SI_RETURN_IF_ERROR(within("compress.pipeline_rank", compression.rank, 1, 4096));
  const bool exposed =
      compression.form != GradientForm::kNone && compression.when == CompressWhen::kExposed;
  if ((ranks.pipeline == 0 || exposed) && ranks.cluster.empty()) {
    return wrong(ranks.pipeline == 0 ? "ranks.pipeline" : "compress.pipeline_when",
                 fmt::format("is \"{}\", but ranks.cluster names no file to choose by",
                             ranks.pipeline == 0 ? "auto" : "exposed"),
                 "Make one with smartinf calibrate --links, or by hand (docs/cluster.md)");
  }
  const std::string_view compresses =
      compression.form != GradientForm::kNone ? "compress.pipeline" : "compress.pipeline_forward";
  if (compression.on() && ranks.pipeline == 1) {
    return wrong(compresses, "is set, but ranks.pipeline is 1", "Leave one of them out");
  }
  if (compression.on() && ranks.chunks > 1) {
    return wrong(compresses, "is set, but stages of several ranks.chunks send everything whole",
                 "Set ranks.chunks = 1, or leave it out");
  }
  SI_RETURN_IF_ERROR(within("ranks.chunks", ranks.chunks, 0, 1024));
  if (ranks.chunks > 1 && (ranks.pipeline == 1 || !ranks.split.empty())) {
    return wrong("ranks.chunks",
                 ranks.pipeline == 1 ? "is set, but ranks.pipeline is 1"
                                     : "divides the layers equally, but ranks.split is set",
                 "Leave one of them out");
  }
  if (!ranks.split.empty() && ranks.pipeline < 2) {
    return wrong(
        "ranks.split",
        fmt::format("is set, but ranks.pipeline is {}", ranks.pipeline == 1 ? "1" : "auto"),
        "Set that to the stages");
  }
  if (ranks.tied == TiedHeads::kFold && ranks.pipeline == 1) {
    return wrong("ranks.tied", "is \"fold\", but ranks.pipeline is 1", "Leave one of them out");
  }
  if (ranks.tensor != 1) {
    return wrong(
        "ranks.tensor",
        fmt::format("is {}: matrices are not divided among ranks, because sums of parts "
                    "would have other bits for each number of ranks, and every layer "
                    "would exchange as much as a whole stage does, with nothing to hide it",
                    ranks.tensor),
        "Leave it out, and divide the layers with ranks.pipeline");
  }
  return within("ranks.timeout", ranks.timeout_s, 1.0, 1e6);
}

Status validate(const Options& options) {
  SI_RETURN_IF_ERROR(validate(options.model));
  SI_RETURN_IF_ERROR(validate(options.lora));
  if (options.lora.on() &&
      (options.model.from.empty() || options.model.init != ModelInit::kWeights)) {
    return wrong("lora.rank", "is set, but there are no weights to adapt",
                 "Name the model's folder in model.from, with model.init = \"weights\"");
  }
  SI_RETURN_IF_ERROR(validate(options.data));
  SI_RETURN_IF_ERROR(validate(options.train));
  const bool has_patterns =
      !options.train.lr_factors.empty() || !options.train.weight_decays.empty();
  if (has_patterns && options.model.from.empty()) {
    model::Architecture model = architecture_of(options.model, options.data.sequence);
    model.vocabulary = std::max(model.vocabulary, 1u);  // names do not depend on it
    SI_ASSIGN_OR_RETURN(const plan::ParameterSpace space, model::make_parameter_space(model));
    SI_RETURN_IF_ERROR(group_parameters(space, options.train).status());
  }
  if (options.checkpoint.every != 0 && options.train.where == OptimizerWhere::kMemory) {
    return wrong("checkpoint.every",
                 "is set, but with optimizer.where = \"memory\" no device holds a state",
                 "Leave it out: use train.save_every, which says how often the state is written");
  }
  if (options.train.keep_best && options.train.where == OptimizerWhere::kMemory) {
    return wrong("train.keep_best",
                 "is set, but with optimizer.where = \"memory\" no device holds a state",
                 "Leave it out, or set optimizer.where = \"device\"");
  }
  const Overlap overlap = options.train.overlap;
  if ((overlap == Overlap::kLate || overlap == Overlap::kEarly) &&
      options.train.where == OptimizerWhere::kMemory) {
    return wrong("optimizer.overlap",
                 fmt::format("is \"{}\", but optimizer.where is \"memory\"",
                             overlap == Overlap::kLate ? "late" : "early"),
                 "Leave it out: torch's own AdamW always updates before the next forward");
  }
  SI_RETURN_IF_ERROR(validate(options.ranks));
  if (options.embedding != EmbeddingRule::kNone) {
    const auto not_with = [](std::string_view why, std::string advice) {
      return wrong("table.embedding", fmt::format("is set, but {}", why), std::move(advice));
    };
    if (options.train.where == OptimizerWhere::kMemory) {
      return not_with("with optimizer.where = \"memory\" no device holds a state",
                      "Leave it out, or set optimizer.where = \"device\"");
    }
    if (options.lora.on()) {
      return not_with("adapters leave the embedding as it is, in the files of model.from",
                      "Leave it out, or set lora.rank = 0");
    }
    if (options.ranks.pipeline > 1) {
      return not_with("stages of a pipeline have their parameters each",
                      "Leave it out, or set ranks.pipeline = 1");
    }
  }
  return validate(options.checkpoint);
}

}  // namespace smartinf::train
