// What the engine writes behind the trainer's client metadata where devices keep residuals: the
// step these are of, and how far weights step ahead by them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/kernels/feedback.h"

namespace smartinf::engine {

struct StepMetadata {
  std::string client_metadata;                    // the trainer's
  std::optional<base::StepNumber> residual_step;  // nothing: no residual was ever written
  std::vector<kernels::StepAhead> ahead;          // by group; empty: not known
};

/// One text of at most storage::Store::kClientMetadataBytesMax, as metadata.client_metadata is.
/// Where there is no room for what belongs behind it, `ahead` is left out first: after a resume the
/// weights of the first forward then are the stored ones. Groups in a row with the same rates take
/// 16 bytes together.
std::string join_metadata(const StepMetadata& metadata);

/// The way back. A text that join_metadata() did not write is all the trainer's.
StepMetadata split_metadata(std::string stored);

}  // namespace smartinf::engine
