// The start of `smartinf train` in several processes, and its end where one of them fails.
#pragma once

#include <string>

#include "smartinf/base/status.h"
#include "smartinf/config/recipe.h"
#include "smartinf/train/ranks/ranks.h"

#include "apps/smartinf/interrupt.h"

namespace smartinf::apps {

/// Meets the other processes that the environment says there are; alone where it says nothing. Puts
/// the devices of all ranks into the recipe (expand_rank_paths). Errors: of the environment, and of
/// who does not come; kInvalidArgument where another rank has another recipe.
base::Result<train::Ranks> meet_ranks(config::LoadedRecipe& loaded, Interrupt& interrupt);

/// ranks.pipeline = "auto" becomes what smartinf plan finds for the boxes of ranks.cluster, and
/// compress.pipeline_when = "exposed" and compress.stages = "auto" the gradients that it says; an
/// empty ranks.split becomes its division where that is not of equal computing. With one process
/// there is one stage. note: what to say of it. Called by all ranks. Errors: the plan's;
/// kInvalidArgument for another number of ranks than the boxes have.
base::Status settle_stages(config::LoadedRecipe& loaded, const train::Ranks& ranks,
                           std::string& note);

/// make_token_data(): the first rank makes them, then one process of each machine that does not see
/// them, and the others find them. Called by all ranks.
base::Status make_data(config::LoadedRecipe& loaded, const train::Ranks& ranks, bool start_over,
                       bool quiet, const Interrupt& interrupt);

/// train.precision = "auto" becomes what the run began with; of one that begins, what is faster on
/// the first rank's machine. note: what to say of it.
base::Status settle_precision(config::LoadedRecipe& loaded, const train::Ranks& ranks,
                              bool start_over, std::string& note);

/// Says what failed and on which rank, lets the others know, and returns the exit code. started:
/// what the user gave was right.
int fail(const train::Ranks& ranks, base::Status status, bool started = false);

}  // namespace smartinf::apps
