// The text that every device of a run carries: what model and rule its state belongs to, and the
// names of all devices, so that a missing one can be named. Fields are in docs/format.md.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::engine {

struct RunDescription {
  plan::ParameterSpace space;
  kernels::UpdateRule rule = kernels::UpdateRule::kAdamW;
  std::vector<std::string> devices;  // names at creation, by device index
};

std::string to_json(const RunDescription& description);
/// Errors: kCorrupt for text that to_json() did not write.
base::Result<RunDescription> run_description_from_json(std::string_view text);

}  // namespace smartinf::engine
