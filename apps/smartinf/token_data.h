// Text and conversations of a recipe as token files: made by scripts/make_token_files.py with the
// model's tokenizer, kept in the run's folder.
#pragma once

#include <stop_token>

#include "smartinf/base/status.h"
#include "smartinf/config/recipe.h"

namespace smartinf::apps {

/// Where the folder model.from has a tokenizer, puts token files in place of what in data.paths,
/// data.validation_paths and data.evaluation is none: RUN/data/training.safetensors and so on. One
/// that is there already is used again, unless what it was made of is newer. quiet: nothing but
/// errors is said. Errors: of find_model(); kNotFound for a path that is not there;
/// kFailedPrecondition where the script fails, which has said why; kCancelled.
base::Status make_token_data(config::Recipe& recipe, bool quiet, const std::stop_token& stop);

}  // namespace smartinf::apps
