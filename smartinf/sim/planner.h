// From a model and a machine to what it needs, how long a step takes in each way of running it,
// what binds, what to buy next, and how long the drives last.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// Bytes at rest, with every activation recomputed from its layer's checkpoint.
struct MemoryNeed {
  uint64_t gpu_bytes =
      0;  // two layers' weights, one layer's gradients and activations, checkpoints, logits
  // Weights in 16 bit; gradients where they do not go to the drive; slots of the host update.
  // Without a GPU the trainer's whole process, as it peaks.
  uint64_t host_bytes = 0;
  uint64_t host_bytes_without_checkpoints =
      0;  // every layer's activations kept; without a GPU only
  // Likewise with optimizer.where = "memory", checkpoints and not: torch's AdamW beside the model.
  uint64_t memory_host_bytes = 0;
  uint64_t memory_host_bytes_without_checkpoints = 0;
  uint64_t drive_bytes =
      0;  // of one device: its share of the state, twice (a step is never written in place)
};
MemoryNeed memory_need(const ModelShape& model, const Machine& machine, const StepOptions& options);

/// One way of running it.
struct Choice {
  std::string label;  // "su+o, bf16 state, hidden behind both"
  StepOptions options;
  StepTimes times;
  MemoryNeed need;
  bool exact = true;  // bits of f32 training
  bool fits = true;
  std::string shortfall;  // what does not fit, and by how much
  double tokens_per_s = 0;
  double drive_life_days = 0;  // of the drive that wears fastest; 0: endurance not known
  double cost_per_mtoken = 0;  // per million tokens; 0: no prices given
};

struct Purchase {
  std::string what;  // "one more NVMe Gen4"
  double step_s = 0;
  double saved = 0;  // share of the step
};

struct Plan {
  ModelShape model;
  Machine machine;
  std::vector<Choice> choices;  // fastest first among those that fit, then the others
  size_t recommended = 0;       // exact and fastest, or the way asked for; index into choices
  bool fits = false;
  std::vector<Purchase> purchases;  // for the recommended choice, best first
};

/// Tries every method the devices can do, the state formats and what hides the update. With
/// `asked`, the method, format and hiding of base_options are tried too and are what is
/// recommended. Errors: those of simulate_step.
base::Result<Plan> make_plan(const ModelShape& model, const Machine& machine,
                             const StepOptions& base_options, bool asked = false);

/// A recipe for `smartinf train`: model, engine and devices; data and paths are to be filled in.
/// Errors: kUnsupported for a model that is not of the Llama form, which is what train trains.
base::Result<std::string> plan_recipe(const Plan& plan);

/// One page that needs nothing else: tables and charts as inline SVG.
std::string plan_html(const Plan& plan);

}  // namespace smartinf::sim
