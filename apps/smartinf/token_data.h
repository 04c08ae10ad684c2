// Text and conversations of a recipe as token files: made by scripts/make_token_files.py with the
// model's tokenizer, kept in the run's folder.
#pragma once

#include <stop_token>

#include "smartinf/base/status.h"
#include "smartinf/config/recipe.h"

namespace smartinf::apps {

/// Where the folder model.from has a tokenizer, puts token files in place of what in data.paths,
/// data.validation_paths and data.evaluation is none: RUN/data/training.safetensors and so on. One
/// that is there already is used again if it was made of the same (a file beside it says of what),
/// and of a run that has begun only what is evaluated is ever replaced; start_over: this one's
/// state is going to be deleted. quiet: nothing but errors is said. Errors: of find_model() and
/// WeightFiles::open(); kFailedPrecondition, with the reason, where the script fails; kCancelled.
base::Status make_token_data(config::Recipe& recipe, bool start_over, bool quiet,
                             const std::stop_token& stop);

}  // namespace smartinf::apps
