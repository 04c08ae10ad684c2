// The weights that adapters are trained beside: every use of adapters needs these and no others,
// for what was learnt beside one model says something else beside another.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"
#include "smartinf/model/weight_files.h"
#include "smartinf/train/position.h"

namespace smartinf::train {

/// there: what the run has committed. digest: WeightFiles::digest() of files. Errors: kMismatch.
base::Status check_adapter_base(const Position& there, const model::WeightFiles& files,
                                uint64_t digest);

/// Opens the model's folder and reads all of it for the comparison. client_metadata: of the run's
/// committed step. Errors: of WeightFiles; kMismatch.
base::Result<model::WeightFiles> open_adapter_base(
    const std::string& folder, const model::Architecture& architecture,
    const std::string& client_metadata,
    const std::function<base::Status(uint64_t done, uint64_t total)>& progress = {});

}  // namespace smartinf::train
