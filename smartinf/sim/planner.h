// From a model and a machine to what it needs, how long a step takes in each way of running it,
// what binds, what to buy next, and how long the drives last.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/plan/training_memory.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// What computes the model, and the settings that decide what it holds.
struct TrainingUse {
  plan::TrainingProgram program = plan::TrainingProgram::kTrain;
  bool release_gradients = false;  // the Python package only
  bool recompute = true;           // activations: train.checkpoint_activations
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

/// One way of running it.
struct Choice {
  std::string label;  // "su+o, bf16 state"
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
  std::string what;   // "one more NVMe Gen4"
  double step_s = 0;  // 0: what makes it fit at all
  double saved = 0;   // share of the step
};

/// One of the programs that could run it.
struct UseNeed {
  TrainingUse use;
  MemoryNeed need;        // with the recommended choice's options
  std::string shortfall;  // empty: it fits
};

struct Plan {
  ModelShape model;
  Machine machine;
  TrainingUse use;              // what the choices are judged for
  std::vector<Choice> choices;  // fastest first among those that fit, then the others
  size_t recommended = 0;       // exact and fastest, or the way asked for; index into choices
  bool fits = false;
  std::vector<UseNeed> uses;          // every program, whether it fits or not
  std::vector<std::string> ways_out;  // settings that would make it fit; empty when it does
  std::vector<Purchase> purchases;    // for the recommended choice, best first
};

struct PlanRequest {
  StepOptions options;  // sizes, optimizer, accumulation; with `requested` method and format, too
  bool requested = false;  // that method and format are tried, too, and are what is recommended
  /// Empty: the first that fits of `smartinf train` (where it can train the model), the Python
  /// package, and the Python package with release_gradients; the first where none does.
  std::optional<plan::TrainingProgram> program;
  bool recompute = true;
};

/// Tries every method the devices can do and the state formats, of what `smartinf train` and the
/// Python package can run. Errors: those of simulate_step.
base::Result<Plan> make_plan(const ModelShape& model, const Machine& machine,
                             const PlanRequest& request);

/// Ok, or what of a model `smartinf train` has not: kUnsupported, by name.
base::Status check_train_can(const ModelShape& model);

/// A recipe for `smartinf train`: every key of the model, engine and devices; data and paths are to
/// be filled in. Errors: as check_train_can; kOutOfMemory where train would not fit.
base::Result<std::string> plan_recipe(const Plan& plan);

/// "state is updated on the devices, gradients go whole": what a method's short name means.
std::string_view method_meaning(Method method);
/// "7 days: this drive would be worn out in about a week"; "-" where endurance is not known.
std::string drive_life_text(double days);
constexpr double kFewDays = 60;
/// One sentence: fits or not, how, and what wears out soon.
std::string plan_verdict(const Plan& plan);

/// One page that needs nothing else: tables and charts as inline SVG.
std::string plan_html(const Plan& plan);

}  // namespace smartinf::sim
