#include "apps/smartinf/move_state.h"

#include <algorithm>
#include <cstdio>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/plan/stages.h"
#include "smartinf/train/corpus.h"
#include "smartinf/train/model_source.h"
#include "smartinf/train/ranks/rank_start.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/progress.h"
#include "apps/smartinf/remote_flags.h"
#include "apps/smartinf/state_places.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

Status check_apart(const engine::DeviceSources& from, const engine::DeviceSources& to) {
  for (const auto& source : from) {
    for (const auto& target : to) {
      if (source->place() != target->place()) continue;
      return Status(ErrorCode::kInvalidArgument, "a device is both source and target",
                    "The new state is made beside the old one, so it needs another directory.",
                    base::ErrorPlace{target->name(), {}, {}, 0});
    }
  }
  return Status();
}

/// A device that cannot keep what is replaced loses it before the new state is written: not for the
/// sake of a source that turns out to be damaged.
Status check_whole(const engine::DeviceSources& from, uint64_t memory_bytes, Progress& progress) {
  for (const auto& device : from) {
    storage::CheckOptions options;
    options.memory_bytes = memory_bytes;
    options.progress = [&](uint64_t done, uint64_t total) { return progress(done, total); };
    Status first;
    SI_RETURN_IF_ERROR(device
                           ->check(options,
                                   [&](const storage::StoreFault& fault) {
                                     if (fault.costs_state && first.ok()) first = fault.status;
                                   })
                           .status());
    if (!first.ok()) return std::move(first).with_context("nothing was replaced");
  }
  return Status();
}

/// Elements of each stage, with the targets that are to have them as ranks.
Result<std::vector<plan::RankSpan>> spans_of(const MoveFlags& flags) {
  if (flags.stages == 0) return std::vector<plan::RankSpan>();
  const auto refuse = [](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  if (flags.from.size() != 1 || !is_run_folder(flags.from.front())) {
    return refuse("--stages is given, and --from names devices",
                  "Name the run's folder, whose recipe says which model it is.");
  }
  if (flags.to.size() % flags.stages != 0) {
    return refuse(fmt::format("--to names {} devices, which are not as many for each of {} stages",
                              flags.to.size(), flags.stages),
                  "Name a multiple of --stages.");
  }
  SI_ASSIGN_OR_RETURN(config::LoadedRecipe loaded, load_run(flags.from.front()));
  train::Options& options = loaded.recipe.options;
  if (options.lora.on()) {
    return refuse("--stages is given, but the run's state is of adapters",
                  "Leave it out: that state is small.");
  }
  if (!flags.split.empty() || options.ranks.pipeline != flags.stages) {
    options.ranks.split = flags.split;
  }
  options.ranks.pipeline = flags.stages;
  options.model = train::with_defaults(options.model);
  SI_ASSIGN_OR_RETURN(train::ModelSource source, train::find_model(options));
  if (source.architecture.vocabulary == 0) {
    source.architecture.vocabulary = train::kByteVocabulary;
  }
  SI_ASSIGN_OR_RETURN(
      const plan::Stages stages,
      train::divide_stages(source.architecture, options, static_cast<uint32_t>(flags.to.size()),
                           /*chunks=*/1));
  return plan::rank_spans(stages, model::make_units(source.architecture));
}

/// Devices that have their number as rank.
engine::DeviceSources targets_of(const MoveFlags& flags, const serve::RemoteOptions& remote) {
  engine::UpdaterOptions options;
  options.pin_threads = false;
  options.remote = remote;
  for (const std::string& path : flags.to) {
    engine::DeviceOptions& device = options.devices.emplace_back();
    device.path = path;
    device.rank = static_cast<uint32_t>(options.devices.size() - 1);
  }
  return engine::local_sources(options);
}

Result<engine::ReshardSummary> move(const MoveFlags& flags, const engine::DeviceSources& from,
                                    const engine::DeviceSources& to, uint64_t memory_bytes,
                                    base::StateFormat& format, Progress& progress) {
  const bool wipes = flags.replace && std::any_of(to.begin(), to.end(), [](const auto& device) {
                       return !device->keeps_replaced();
                     });
  if (wipes) {
    progress.rename("checking");
    SI_RETURN_IF_ERROR(check_whole(from, memory_bytes, progress));
  }
  progress.rename("copying the state");
  SI_ASSIGN_OR_RETURN(engine::StoredRun run,
                      engine::open_stored_run(from, storage::ReaderLock::kTake));
  engine::ReshardOptions options;
  options.format = flags.format.format(run.layout().format);
  format = options.format;
  options.subgroup_elements = flags.subgroup_elements;
  options.memory_budget_bytes = memory_bytes;
  if (flags.durability == "none") options.durability = storage::Durability::kNone;
  options.progress = [&](uint64_t done, uint64_t total) { return progress(done, total); };
  options.replace = flags.replace;
  SI_ASSIGN_OR_RETURN(options.stages, spans_of(flags));
  if (!options.stages.empty() && options.stages.back().end() != run.description.space.count()) {
    return Status(ErrorCode::kMismatch,
                  "the run's recipe describes another model than its state is of",
                  "Leave out --stages.");
  }
  auto moved = engine::reshard(run, to, options);
  if (moved.ok() || !flags.replace || wipes) return moved;
  return std::move(moved).status().with_context("nothing was replaced");
}

}  // namespace

void add_move_flags(CLI::App& command, MoveFlags& flags) {
  add_format_flags(command, flags.format, "as they are");
  command
      .add_option("--subgroup-elements", flags.subgroup_elements,
                  "Elements of a subgroup [as they are, if the memory budget allows]")
      ->type_name("N");
  command.add_option("--durability", flags.durability, "Durability of the new state [step]")
      ->check(CLI::IsMember(base::enum_name_list<storage::Durability>()))
      ->type_name("step|none");
  command.add_option("--memory-budget", flags.memory_budget, "Memory for the copy [256MiB]")
      ->type_name("SIZE");
  command.add_flag("--json", flags.json, "Print one JSON object");
  add_remote_flags(command, flags.remote);
}

int move_state(const MoveFlags& flags) {
  const Result<uint64_t> memory_bytes = memory_budget(flags.memory_budget);
  if (!memory_bytes.ok()) return report(memory_bytes.status(), kExitUsage);
  serve::RemoteOptions remote = flags.remote;
  const Result<std::vector<std::string>> from = devices_of(flags.from, &remote);
  if (!from.ok()) return report(from.status());
  const engine::DeviceSources sources = engine::sources_at(*from, storage::RingKind::kAuto, remote);
  const engine::DeviceSources targets = targets_of(flags, remote);
  if (const Status apart = check_apart(sources, targets); !apart.ok()) {
    return report(apart, kExitUsage);
  }
  const Interrupt interrupt("stopping; press Ctrl-C again to stop at once");
  Progress progress("copying the state", interrupt.token());
  const uint64_t begin_ns = base::now_ns();
  base::StateFormat format = base::StateFormat::kF32;
  const Result<engine::ReshardSummary> moved =
      move(flags, sources, targets, *memory_bytes, format, progress);
  progress.clear();
  if (!moved.ok()) return report(moved.status());
  if (flags.json) {
    const nlohmann::ordered_json json{{"run", moved->run.to_string()},
                                      {"step", moved->step},
                                      {"state_format", base::state_format_name(format)},
                                      {"state_bytes", moved->state_bytes},
                                      {"subgroup_elements", moved->subgroup_elements},
                                      {"blocks_without_checksum", moved->blocks_without_checksum},
                                      {"seconds", base::seconds_since(begin_ns)},
                                      {"devices", flags.to}};
    std::printf("%s\n", json.dump(2).c_str());
    return kExitDone;
  }
  std::printf(
      "step %llu, %s in the format %s, is on %s\n", static_cast<unsigned long long>(moved->step),
      base::format_bytes(moved->state_bytes).c_str(), base::state_format_name(format).c_str(),
      fmt::format("{}", fmt::join(flags.to, ", ")).c_str());
  std::string words;
  for (size_t i = 0; i < flags.to.size(); ++i) {
    words += fmt::format(" --device.{}.path {}", i, flags.to[i]);
  }
  if (!flags.format.moments.empty()) words += " --optimizer.format " + flags.format.moments;
  if (!flags.format.master.empty()) words += " --optimizer.master " + flags.format.master;
  // The moved run is one of its own, which no folder knows yet.
  words += " --take-over " + moved->run.to_string().substr(0, 8);
  std::printf("to resume it: smartinf train RECIPE%s\n", words.c_str());
  return kExitDone;
}

}  // namespace smartinf::apps
