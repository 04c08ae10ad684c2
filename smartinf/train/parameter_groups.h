// Which parameters share a learning rate and a decay: torch's param_groups, chosen by patterns of
// names (train.lr_factors, train.weight_decays).
#pragma once

#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// Values that a group has of its own.
struct ParameterGroup {
  double lr_factor = 1;  // of the schedule's learning rate
  double weight_decay = 0;
};

struct GroupedParameters {
  plan::ParameterSpace space;  // each range with its group
  std::vector<ParameterGroup> groups;
  double table_lr_factor = 1;  // of an embedding that is a table
};

/// Whether a whole name fits a pattern as a shell has them (fnmatch): * stands for any text, ? for
/// any one character, [0-3] for one of these.
bool matches(const std::string& pattern, const std::string& name);

/// `space` as make_parameter_space() gives it, cut into groups by the patterns of `train`. Groups
/// depend on the patterns, not on their numbers: these may change while a run goes on.
/// Errors: kInvalidArgument, beginning with the key, for what is not "PATTERN = NUMBER", a number
/// that cannot work, or a pattern that no name fits, with the name that was perhaps meant.
base::Result<GroupedParameters> group_parameters(const plan::ParameterSpace& space,
                                                 const TrainOptions& train);
/// The same of all that is trained of a model without adapters. An embedding that is a table has a
/// name for patterns, and no range.
base::Result<GroupedParameters> group_model(const model::Architecture& model,
                                            const TrainOptions& train);

}  // namespace smartinf::train
