// Exchanges what the ranks of a run find out of each other before it starts.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "smartinf/base/status.h"
#include "smartinf/engine/device_source.h"
#include "smartinf/engine/options.h"
#include "smartinf/model/architecture.h"
#include "smartinf/plan/stage_plan.h"
#include "smartinf/train/memory_plan.h"
#include "smartinf/train/options.h"
#include "smartinf/train/ranks/ranks.h"

namespace smartinf::train {

/// Errors: kInvalidArgument for what only one process can do, and for a pipeline that the ranks and
/// micro batches do not suffice for.
base::Status check_ranks(const Options& options, const Ranks& ranks);

/// This machine's cores, shared out among the devices of its ranks where the user has not said how.
void share_cores(engine::UpdaterOptions& options, const Ranks& ranks);

/// What computing a model's parts costs.
plan::StageCosts stage_costs(std::span<const plan::Unit> units, const model::Architecture& model,
                             const Options& options);
/// Stages of so many chunks each, as options.ranks says: of equal computing, or of ranks.split; a
/// tied head where ranks.tied says. Errors: kInvalidArgument naming the key.
base::Result<plan::Stages> divide_stages(const model::Architecture& model, const Options& options,
                                         uint32_t world, uint32_t chunks);

// All ranks call these in the same order. Errors also: the ranks'.

/// All devices, for what is asked before they are opened: those of other ranks answer from there.
engine::DeviceSources sources_of(const Ranks& ranks, const engine::UpdaterOptions& options);

/// Limits that every rank can keep: one plan for all of them is made from it. Errors: kMismatch
/// where only some have an accelerator.
base::Result<MemoryLimits> least_of_ranks(MemoryLimits limits, const Ranks& ranks);

/// key: what names the files; digest: of what this rank reads in them. Errors: kMismatch, with the
/// rank that reads something else.
base::Status check_same_files(std::string_view key, uint64_t digest, const Ranks& ranks);

}  // namespace smartinf::train
