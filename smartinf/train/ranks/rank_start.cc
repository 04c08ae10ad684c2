#include "smartinf/train/ranks/rank_start.h"

#include <algorithm>
#include <array>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "smartinf/base/float_formats.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/ranks/shared_sources.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

void share_cores(engine::UpdaterOptions& options, const Ranks& ranks) {
  const auto own = std::ranges::count(options.devices, ranks.rank(), &engine::DeviceOptions::rank);
  const uint64_t devices = std::max<uint64_t>(1, static_cast<uint64_t>(own)) * ranks.local_world();
  const uint64_t each = std::max<uint64_t>(1, std::thread::hardware_concurrency() / devices);
  for (engine::DeviceOptions& device : options.devices) {
    if (device.threads == 0) device.threads = static_cast<uint32_t>(each);
  }
  options.pin_threads = options.pin_threads && ranks.local_world() == 1;
}

engine::DeviceSources sources_of(const Ranks& ranks, const engine::UpdaterOptions& options) {
  engine::DeviceSources sources = engine::local_sources(options);
  if (ranks.alone()) return sources;
  std::vector<uint32_t> rank_of;
  for (const engine::DeviceOptions& device : options.devices) rank_of.push_back(device.rank);
  return engine::share_sources(std::move(sources), rank_of, ranks.collectives());
}

Status check_ranks(const Options& options, const Ranks& ranks) {
  const TrainOptions& train = options.train;
  const uint32_t stages = options.ranks.pipeline;
  const auto refuse = [](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  if (stages == 0) {
    return refuse("ranks.pipeline is \"auto\", and nothing has chosen",
                  "Name the number of stages here");
  }
  if (ranks.world() % stages != 0) {
    return refuse(
        fmt::format("ranks.pipeline is {}, and there {}", stages,
                    ranks.alone() ? "is one process" : fmt::format("are {} ranks", ranks.world())),
        fmt::format("Start {} ranks or a multiple of that (torchrun --nproc-per-node {}), "
                    "or set ranks.pipeline to what divides the ranks",
                    stages, stages));
  }
  if (ranks.alone()) return Status();
  if (stages > 1 && options.memory.activations == plan::Activations::kOffload) {
    return refuse(
        "memory.activations is \"offload\", but a stage of a pipeline keeps activations "
        "in memory",
        "Set it to \"recompute\", or ranks.pipeline to 1");
  }
  if (train.accumulation < ranks.world()) {
    return refuse(fmt::format("train.accumulation is {}, but there are {} ranks, which share a "
                              "step's micro batches",
                              train.accumulation, ranks.world()),
                  fmt::format("Set it to {} or a multiple of that, and train.micro_batch lower, or "
                              "start fewer ranks",
                              ranks.world()));
  }
  if (train.where == OptimizerWhere::kMemory) {
    return refuse("optimizer.where is \"memory\", which is for one process",
                  "Set it to \"device\", or start one process");
  }
  if (train.layer_stats_every != 0) {
    return refuse("train.layer_stats_every is set, but no rank has a layer's whole gradient",
                  "Leave it out, or start one process");
  }
  return Status();
}

Result<MemoryLimits> least_of_ranks(MemoryLimits limits, const Ranks& ranks) {
  const std::array<uint64_t, 5> mine{limits.resident_bytes, limits.host_bytes,
                                     limits.accelerator_bytes, limits.accelerator.free_bytes,
                                     limits.accelerator.taken_bytes};
  SI_ASSIGN_OR_RETURN(const std::vector<uint64_t> all, ranks.all<uint64_t>(mine));
  for (uint32_t rank = 0; rank < ranks.world(); ++rank) {
    const uint64_t* of = all.data() + rank * mine.size();
    if ((of[3] > 0) != (mine[3] > 0)) {
      return Status(
          ErrorCode::kMismatch,
          fmt::format("{} {}, and {} {}", ranks.name(rank),
                      of[3] > 0 ? "computes on an accelerator" : "has none",
                      ranks.name(ranks.rank()), mine[3] > 0 ? "computes on one" : "has none"),
          "Set train.accelerator = \"cpu\", or leave machines without one out");
    }
    limits.resident_bytes = std::max(limits.resident_bytes, of[0]);
    limits.host_bytes = std::min(limits.host_bytes, of[1]);
    limits.accelerator_bytes = std::min(limits.accelerator_bytes, of[2]);
    limits.accelerator.free_bytes = std::min(limits.accelerator.free_bytes, of[3]);
    limits.accelerator.taken_bytes = std::max(limits.accelerator.taken_bytes, of[4]);
  }
  return limits;
}

Status check_same_files(std::string_view key, uint64_t digest, const Ranks& ranks) {
  SI_ASSIGN_OR_RETURN(const std::vector<uint64_t> all, ranks.all<uint64_t>(std::span(&digest, 1)));
  for (uint32_t rank = 0; rank < ranks.world(); ++rank) {
    if (all[rank] == all[0]) continue;
    return Status(ErrorCode::kMismatch,
                  fmt::format("{}: {} reads something else than rank 0", key, ranks.name(rank)),
                  "Use the same files on all machines, or a folder that all of them see");
  }
  return Status();
}

namespace {

/// Whether the first stage computes a tied head. Stages in chunks wait for it: only if asked for.
bool folds(const model::Architecture& model, const Options& options, const plan::Stages& stages) {
  if (!model.tied_head || options.ranks.tied != TiedHeads::kAuto) {
    return options.ranks.tied == TiedHeads::kFold;
  }
  // Beside adapters a copy is not trained: nothing is sent for it.
  if (options.lora.on() || stages.chunks > 1) return false;
  const TrainOptions& train = options.train;
  return plan::head_folds(
      {model.vocabulary, model.width,
       uint64_t{train.accumulation} * train.micro_batch * options.data.sequence,
       static_cast<uint32_t>(base::data_type_bytes(precision_data_type(train.precision))),
       stages.replicas});
}

}  // namespace

plan::StageCosts stage_costs(std::span<const plan::Unit> units, const model::Architecture& model,
                             const Options& options) {
  return {units, model.width, uint64_t{model.vocabulary} * model.width, options.data.sequence};
}

Result<plan::Stages> divide_stages(const model::Architecture& model, const Options& options,
                                   uint32_t world, uint32_t chunks) {
  if (options.ranks.tied == TiedHeads::kFold && !model.tied_head) {
    return Status(ErrorCode::kInvalidArgument,
                  "ranks.tied is \"fold\", but the head has a matrix of its own",
                  "Leave it out: the last stage computes such a head");
  }
  const std::vector<plan::Unit> units = model::make_units(model);
  const plan::StageCosts costs = stage_costs(units, model, options);
  plan::Stages divided;
  divided.replicas = world / options.ranks.pipeline;
  divided.chunks = chunks;
  divided.folds = folds(model, options, divided);
  const size_t parts = units.size() - (divided.folds ? 1 : 0);
  if (chunks > 1 && parts < uint64_t{options.ranks.pipeline} * chunks) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("ranks.chunks is {}, but the model has {} parts to divide among {} "
                              "stages",
                              chunks, parts, options.ranks.pipeline),
                  fmt::format("Set it to {} at most", parts / options.ranks.pipeline));
  }
  auto begins = plan::divide_units(costs, options.ranks.pipeline * chunks, options.ranks.split,
                                   divided.folds);
  if (!begins.ok() && divided.folds && options.ranks.tied == TiedHeads::kAuto) {
    divided.folds = false;  // the last stage has nothing but the head
    begins = plan::divide_units(costs, options.ranks.pipeline * chunks, options.ranks.split);
  }
  SI_ASSIGN_OR_RETURN(divided.begin, std::move(begins));
  return divided;
}

}  // namespace smartinf::train
