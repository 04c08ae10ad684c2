// What training a model needs of a machine's memory and drives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/plan/training_memory.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// What computes the model, and the settings that decide what it holds.
struct TrainingUse {
  plan::TrainingProgram program = plan::TrainingProgram::kTrain;
  bool release_gradients = false;  // the Python package only
  bool recompute = true;           // activations: memory.activations
  bool in_memory = false;          // optimizer.where = "memory": torch's own AdamW
};
/// "smartinf train", "Python, release_gradients=True".
std::string use_name(const TrainingUse& use);

struct MemoryNeed {
  uint64_t gpu_bytes = 0;  // of one GPU; 0 without
  uint64_t host_bytes = 0;
  uint64_t drive_bytes = 0;  // of one device: its share of the state, twice (a step is never
                             // written in place)
  std::vector<plan::MemoryPart> gpu_parts;
  std::vector<plan::MemoryPart> host_parts;
};
MemoryNeed memory_need(const ModelShape& model, const Machine& machine, const StepOptions& options,
                       const TrainingUse& use);

/// What does not fit, and by how much, or is beyond the program; empty: all of it does.
std::string shortfall_of(const MemoryNeed& need, const Machine& machine, const TrainingUse& use);

}  // namespace smartinf::sim
