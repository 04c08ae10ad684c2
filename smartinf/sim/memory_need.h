// Needs of a training: its model's part of a machine's memory and drives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/plan/stages.h"
#include "smartinf/plan/training_memory.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// The program that computes the model, and the settings that decide what it holds.
struct TrainingUse {
  plan::TrainingProgram program = plan::TrainingProgram::kTrain;
  bool release_gradients = false;  // the Python package only
  bool recompute = true;           // activations: memory.activations
  bool in_memory = false;          // optimizer.where = "memory": torch's own AdamW
  /// The Python package: of gradients on their way in memory; the others are spilled.
  uint64_t gradient_budget = ~uint64_t{0};
  bool streamed = false;  // the Python package, smartinf.from_pretrained(..., memory_budget=...)

  bool operator==(const TrainingUse&) const = default;
};
/// "smartinf train", "Python, release_gradients=True".
std::string use_name(const TrainingUse& use);

struct MemoryNeed {
  uint64_t gpu_bytes = 0;   // of one GPU; 0 without
  uint64_t host_bytes = 0;  // of several ranks of `smartinf train` that of one
  uint64_t drive_bytes = 0;  // of one device: its share of the state, twice (a step is never
                             // written in place), of spilled gradients and of the spool
  std::vector<plan::MemoryPart> gpu_parts;
  std::vector<plan::MemoryPart> host_parts;
  /// Plan that plan::place_training makes for the machine's limits: for kTrain as `smartinf train`
  /// asks it, for a streamed model of Python what its memory budget leaves in memory.
  plan::TrainingPlan plan;
  bool gradients_spilled = false;  // not all of them stay in memory until they are updated
  uint64_t memory_budget = 0;      // of a streamed model of Python, to give
  std::vector<plan::Unit> units;   // that it places: of a stage its own, one behind another
  bool of_stage = false;           // of a pipeline

  /// Units whose weights come from the devices, and those that do not stay on the GPU but in the
  /// host's memory.
  size_t units_from_devices() const {
    return plan.streams ? units.size() - plan.placement.in_memory : 0;
  }
  size_t units_from_host() const {
    return plan.streams && gpu_bytes > 0 ? plan.placement.in_memory - plan.placement.on_accelerator
                                         : 0;
  }
};
/// pipeline: of one rank's stage, where each of options.ranks is a machine of its own.
/// Buffers are counted with the transfers that fill the machine file's drives, as `smartinf train`
/// counts them where a drive has been measured.
MemoryNeed memory_need(const ModelShape& model, const Machine& machine, const StepOptions& options,
                       const TrainingUse& use, const plan::Pipeline& pipeline = {});

/// The options with what of the plan a step has to know.
StepOptions with_plan(StepOptions options, const MemoryNeed& need);

/// Bytes of the host's memory that a process may have; 0: not known.
uint64_t host_limit_bytes(const Machine& machine, const StepOptions& options);

/// Text about what does not fit, and by how much, or is beyond the program; empty: all of it does.
std::string shortfall_of(const MemoryNeed& need, const Machine& machine, const StepOptions& options,
                         const TrainingUse& use);

}  // namespace smartinf::sim
