// What of a run stays in memory, decided before anything is allocated. Needs no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/engine/options.h"
#include "smartinf/model/architecture.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/training_memory.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// The model as memory sees it. space: of what is trained.
plan::TrainingModel training_model(const model::Architecture& model, const Options& options,
                                   const plan::ParameterSpace& space);

/// Of the accelerator that the model computes on; all 0: it computes in the host's memory.
struct AcceleratorMemory {
  uint64_t free_bytes = 0;
  uint64_t taken_bytes = 0;  // by what the device's libraries take once they are used
};

/// What options.memory leaves open comes from this process and machine, as they are now. Errors:
/// kOutOfMemory with what is needed and what is allowed.
base::Result<plan::TrainingPlan> plan_run(const model::Architecture& model, const Options& options,
                                          const engine::UpdaterOptions& updater,
                                          const plan::ParameterSpace& space,
                                          const AcceleratorMemory& accelerator);

/// The plan for people, some lines.
std::vector<std::string> describe_plan(const plan::TrainingPlan& plan,
                                       const model::Architecture& model);

}  // namespace smartinf::train
