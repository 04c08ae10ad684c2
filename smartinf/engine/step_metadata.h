// Metadata that the engine writes behind the trainer's where devices keep residuals: the step these
// are of, and how far weights step ahead by them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/feedback.h"

namespace smartinf::engine {

struct StepMetadata {
  std::string client_metadata;                    // the trainer's
  std::optional<base::StepNumber> residual_step;  // nothing: no residual was ever written
  std::vector<kernels::StepAhead> ahead;          // by group; empty: not known
};

/// One text. Groups in a row with the same rates take 16 bytes together. Errors: kInvalidArgument
/// when it is longer than storage::Store::kClientMetadataBytesMax.
base::Result<std::string> join_metadata(const StepMetadata& metadata);

/// The way back. A text that join_metadata() did not write is all the trainer's.
StepMetadata split_metadata(std::string stored);

}  // namespace smartinf::engine
