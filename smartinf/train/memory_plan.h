// Plan of what stays in memory of a run, decided before anything is allocated. Needs no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/engine/options.h"
#include "smartinf/model/architecture.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/rank_share.h"
#include "smartinf/plan/stages.h"
#include "smartinf/plan/training_memory.h"
#include "smartinf/train/options.h"

namespace smartinf::train {

/// The model as memory sees it. space: of what is trained.
plan::TrainingModel training_model(const model::Architecture& model, const Options& options,
                                   const plan::ParameterSpace& space);

/// Memory of the accelerator that the model computes on; all 0: it computes in the host's memory.
struct AcceleratorMemory {
  uint64_t free_bytes = 0;
  uint64_t taken_bytes = 0;  // by what the device's libraries take once they are used
  bool unified = false;      // with the host's: free_bytes is 0
};

/// Limits of what a process may use. What options.memory leaves open comes from this process and
/// machine, as they are now; ranks of one machine share it.
struct MemoryLimits {
  uint64_t resident_bytes = 0;  // of the process, before there is a model
  uint64_t host_bytes = 0;      // of the whole process
  uint64_t accelerator_bytes = 0;
  AcceleratorMemory accelerator;
  /// Of a run that goes on, of a stage: what its ranks' devices have of the state.
  std::vector<plan::Subgroup> held;
};
MemoryLimits memory_limits(const MemoryOptions& options, const AcceleratorMemory& accelerator,
                           uint32_t local_world = 1);

/// updater.devices have the ranks that drive them, of `world`. One plan for all ranks: of what the
/// rank with the most devices and micro batches needs; but of a pipeline each rank's own. Errors:
/// kOutOfMemory with what is needed and what is allowed.
base::Result<plan::TrainingPlan> plan_run(const model::Architecture& model, const Options& options,
                                          const engine::UpdaterOptions& updater,
                                          const plan::ParameterSpace& space,
                                          const MemoryLimits& limits, uint32_t world = 1,
                                          const plan::Pipeline& pipeline = {});

plan::DeviceSharing device_sharing(const engine::UpdaterOptions& updater, uint32_t world);

/// The plan for people, some lines.
std::vector<std::string> describe_plan(const plan::TrainingPlan& plan);

}  // namespace smartinf::train
