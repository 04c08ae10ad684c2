#include "apps/smartinf/train_ranks.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/compress/density.h"
#include "smartinf/sim/cluster_plan.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/product_rate.h"
#include "smartinf/train/ranks/device_ranks.h"
#include "smartinf/train/ranks/environment.h"
#include "smartinf/train/ranks/join_ranks.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/state_places.h"
#include "apps/smartinf/token_data.h"

namespace smartinf::apps {

using base::Result;
using base::Status;

namespace {

/// Another rank's recipe has other values than the first one's.
Status check_same_recipe(const config::LoadedRecipe& loaded, const train::Ranks& ranks) {
  SI_ASSIGN_OR_RETURN(const std::string first, ranks.from_first(config::print_recipe(loaded)));
  SI_ASSIGN_OR_RETURN(const config::LoadedRecipe there,
                      config::parse_recipe(first, "rank 0's recipe", {}));
  const auto changes = config::changed_keys(there.recipe, loaded.recipe);
  if (changes.empty()) return Status();
  return Status(base::ErrorCode::kInvalidArgument,
                fmt::format("{} is {} here, but {} on rank 0", changes.front().key,
                            changes.front().now, changes.front().before),
                "Start all ranks with the same recipe and flags");
}

}  // namespace

int fail(const train::Ranks& ranks, Status status, bool started) {
  const bool wrong_value = status.code() == base::ErrorCode::kInvalidArgument && !started;
  if (!ranks.alone()) {
    ranks.failed(status);
    status = std::move(status).with_context(fmt::format("rank {}", ranks.rank()));
  }
  return report(status, wrong_value ? kExitUsage : kExitFailed);
}

Result<train::Ranks> meet_ranks(config::LoadedRecipe& loaded, Interrupt& interrupt) {
  SI_ASSIGN_OR_RETURN(const auto environment, train::rank_environment());
  std::vector<engine::DeviceOptions>& devices = loaded.recipe.updater.devices;
  SI_ASSIGN_OR_RETURN(devices,
                      train::expand_rank_paths(devices, environment ? environment->world : 1));
  if (!environment) return train::Ranks();
  interrupt.expect_it_twice();
  if (environment->rank != 0) {
    base::set_log_sink([rank = environment->rank](base::LogLevel level, std::string_view message) {
      if (level == base::LogLevel::kWarning) {
        fmt::print(stderr, "warning: rank {}: {}\n", rank, message);
      }
    });
  }
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(loaded.recipe.options.ranks.timeout_s));
  interrupt.end_at_once(true);
  SI_ASSIGN_OR_RETURN(train::Ranks ranks, train::join_ranks(*environment, timeout));
  interrupt.end_at_once(false);
  const Status same = check_same_recipe(loaded, ranks);
  SI_RETURN_IF_ERROR(ranks.all_ok("the recipe", same));
  return ranks;
}

namespace {

/// The recipe's model as the planner sees it.
Result<sim::ModelShape> shape_of(const train::Options& options) {
  SI_ASSIGN_OR_RETURN(const train::ModelSource source, train::find_model(options));
  sim::ModelShape shape;
  if (!source.config_json.empty()) {
    SI_ASSIGN_OR_RETURN(shape, sim::model_from_hf_config(source.config_json, source.folder));
  } else {
    const model::Architecture& model = source.architecture;
    shape.name = "the model";
    shape.type = "llama";
    shape.layers = model.layers;
    shape.hidden = model.width;
    shape.heads = model.heads;
    shape.kv_heads = model.kv_heads;
    shape.head_size = model.query_width() / model.heads;
    shape.feed_forward = model.mlp_width;
    shape.vocabulary = std::max<uint64_t>(model.vocabulary, 256);  // 0: bytes
    shape.gated = true;
    shape.tied = model.tied_head;
    shape.biases = false;
    SI_RETURN_IF_ERROR(sim::complete_model(shape));
  }
  shape.sequence = options.data.sequence;
  return shape;
}

bool asks_for_exposed(const train::StageCompression& compression) {
  return compression.form != train::GradientForm::kNone &&
         compression.when == train::CompressWhen::kExposed;
}

/// Bytes of a message between stages in its short form over those of a whole one.
double share_of(const train::StageCompression& compression, const train::Options& options,
                uint64_t width, uint64_t value_bytes) {
  const uint64_t tokens = uint64_t{options.train.micro_batch} * options.data.sequence;
  return static_cast<double>(train::compressed_bytes(compression, tokens, width)) /
         static_cast<double>(tokens * width * value_bytes);
}

/// What is chosen for ranks.cluster.
struct Chosen {
  uint32_t pipeline = 1;
  std::string split;              // empty: stages of equal computing
  std::vector<uint32_t> exposed;  // gradients, of each stage and a folded head
  uint32_t compressed_stages = 0;

  std::string to_text() const {
    return fmt::format("{} {}|{}|{}", pipeline, compressed_stages, split, fmt::join(exposed, " "));
  }
  static Chosen from_text(const std::string& text) {
    std::istringstream in(text);
    Chosen chosen;
    in >> chosen.pipeline >> chosen.compressed_stages;
    in.ignore();
    std::getline(in, chosen.split, '|');
    chosen.exposed.assign(std::istream_iterator<uint32_t>(in), {});
    return chosen;
  }
};

Result<Chosen> best_stages(const config::LoadedRecipe& loaded, uint32_t world, std::string& note) {
  const train::Options& options = loaded.recipe.options;
  train::StageCompression compression = options.ranks.compression;
  SI_ASSIGN_OR_RETURN(const sim::Cluster cluster, sim::load_cluster(options.ranks.cluster));
  if (cluster.ranks() != world) {
    return Status(base::ErrorCode::kInvalidArgument,
                  fmt::format("ranks.cluster ({}) has {} ranks, and there are {}",
                              options.ranks.cluster, cluster.ranks(), world),
                  "Start as many, or correct box.ranks");
  }
  train::Options with_defaults = options;
  with_defaults.model = train::with_defaults(options.model);
  SI_ASSIGN_OR_RETURN(const sim::ModelShape model, shape_of(with_defaults));
  sim::ClusterRequest request;
  request.options.rule = loaded.recipe.updater.rule.rule;
  request.options.format = loaded.recipe.updater.format;
  request.options.value_bytes = options.train.precision == train::Precision::kF32 ? 4 : 2;
  request.micro_batch = options.train.micro_batch;
  request.tokens_per_step =
      uint64_t{options.train.micro_batch} * options.train.accumulation * options.data.sequence;
  request.all_boxes = true;
  if (options.ranks.pipeline != 0) request.pipeline = options.ranks.pipeline;
  if (options.ranks.chunks != 0) request.chunks = options.ranks.chunks;
  request.split = options.ranks.split;
  if (options.ranks.tied != train::TiedHeads::kAuto) {
    request.folds = options.ranks.tied == train::TiedHeads::kFold;
  } else if (options.lora.on()) {
    request.folds = false;
  }
  if (options.memory.activations == plan::Activations::kKeep) request.recompute = false;
  if (options.memory.activations == plan::Activations::kRecompute) request.recompute = true;
  const bool exposed = asks_for_exposed(compression);
  if (exposed) {
    request.short_gradient =
        share_of(compression, options, model.hidden, request.options.value_bytes);
  }
  if (compression.forward != train::ActivationForm::kNone) {
    compression.form = train::GradientForm::kInt8;
    request.short_activation =
        share_of(compression, options, model.hidden, request.options.value_bytes);
  }
  const compress::CompressOptions& compress = loaded.recipe.updater.compress;
  if (compress.on()) {
    request.compressed_gradient_bytes = compress::bytes_per_element(compress);
    if (compress.stages != compress::kChosenStages) request.compressed_stages = compress.stages;
  }
  SI_ASSIGN_OR_RETURN(const sim::ClusterPlan plan, sim::plan_cluster(model, cluster, request));
  if (plan.best.empty()) {
    return Status(base::ErrorCode::kOutOfMemory,
                  fmt::format("no stages that ranks.cluster ({}) has the memory for; nearest: {}",
                              options.ranks.cluster, plan.lacks),
                  "Set ranks.pipeline and compress.pipeline_when, or start more ranks");
  }
  const sim::ClusterOption& best = plan.best.front();
  note =
      fmt::format("stages, by {}: {}; a step is to take {}, bound by {}", options.ranks.cluster,
                  sim::option_text(plan, best), base::format_seconds(best.step_s), best.bound_by);
  Chosen chosen{best.pipeline,
                best.uneven ? sim::split_text(plan, best) : std::string(),
                {},
                best.compressed_stages};
  for (const uint64_t last : best.exposed) chosen.exposed.push_back(static_cast<uint32_t>(last));
  if (!exposed || best.exposed.empty()) return chosen;
  note += fmt::format("; exposed gradients of a step, of each stage: {}",
                      fmt::join(chosen.exposed, ", "));
  if (std::ranges::count(best.exposed, 0u) == static_cast<int64_t>(best.exposed.size())) {
    note += ", so compressing them is not worth it";
  }
  return chosen;
}

}  // namespace

Status settle_stages(config::LoadedRecipe& loaded, const train::Ranks& ranks, std::string& note) {
  train::RankOptions& options = loaded.recipe.options.ranks;
  const bool divides = options.pipeline > 1 && options.split.empty() && options.chunks < 2;
  compress::CompressOptions& compress = loaded.recipe.updater.compress;
  const bool compresses = compress.on() && compress.stages == compress::kChosenStages;
  const bool asks =
      options.pipeline == 0 || divides || compresses || asks_for_exposed(options.compression);
  if (options.cluster.empty() || !asks) return {};
  Chosen chosen{std::max(1u, options.pipeline), {}, {}, 0};
  if (!ranks.alone()) {
    Status status;
    if (ranks.first()) {
      Result<Chosen> best = best_stages(loaded, ranks.world(), note);
      status = best.status();
      if (best.ok()) chosen = std::move(*best);
    }
    SI_RETURN_IF_ERROR(ranks.all_ok("ranks.cluster", status));
    SI_ASSIGN_OR_RETURN(const std::string first, ranks.from_first(chosen.to_text()));
    chosen = Chosen::from_text(first);
  }
  options.pipeline = chosen.pipeline;
  if (options.split.empty() && options.chunks < 2) options.split = chosen.split;
  options.compression.exposed = chosen.exposed;
  if (compresses) compress.stages = chosen.compressed_stages;
  return {};
}

Status make_data(config::LoadedRecipe& loaded, const train::Ranks& ranks, bool start_over,
                 bool quiet, const Interrupt& interrupt) {
  // Machines may share a file system: the first rank's files are there before others look.
  const int mine = ranks.first() ? 0 : ranks.local_rank() == 0 ? 1 : 2;
  for (int turn = 0; turn < 3; ++turn) {
    Status made;
    if (turn == mine) {
      made = make_token_data(loaded.recipe, start_over, quiet || !ranks.first(), interrupt.token());
    }
    SI_RETURN_IF_ERROR(ranks.all_ok_without_timeout("token files", made));
  }
  return Status();
}

Status settle_precision(config::LoadedRecipe& loaded, const train::Ranks& ranks, bool start_over,
                        std::string& note) {
  train::TrainOptions& train = loaded.recipe.options.train;
  if (train.precision != train::Precision::kAuto) return Status();
  const auto choose = [&]() -> Status {
    if (!start_over && has_begun(train.run)) {
      const Result<config::LoadedRecipe> before = load_run(train.run);
      if (before.ok()) train.precision = before->recipe.options.train.precision;
    }
    if (train.precision != train::Precision::kAuto) return Status();
    SI_ASSIGN_OR_RETURN(const train::ChosenPrecision chosen,
                        train::choose_precision(train, ranks.local_rank(), ranks.local_world()));
    train.precision = chosen.precision;
    if (!chosen.why.empty()) {
      note = fmt::format("precision: {}, because products make {} (train.precision)",
                         base::enum_name(chosen.precision), chosen.why);
    }
    return Status();
  };
  SI_RETURN_IF_ERROR(ranks.all_ok("train.precision", ranks.first() ? choose() : Status()));
  SI_ASSIGN_OR_RETURN(const std::string name,
                      ranks.from_first(std::string(base::enum_name(train.precision))));
  train.precision = *base::enum_from_name<train::Precision>(name);
  loaded.origins["train.precision"] = {config::Origin::Kind::kMachine, 0};
  if (!loaded.origins.contains("optimizer.gradient_type")) {
    loaded.recipe.updater.gradient_type = train::precision_data_type(train.precision);
  }
  return Status();
}

}  // namespace smartinf::apps
