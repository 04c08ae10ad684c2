// From a model and a machine to what it needs, how long a step takes with each method and state
// format, what binds, what to buy next, and how long the drives last.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/memory_need.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// A method and a state format, with what they come to.
struct PlanOption {
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
  MemoryNeed need;        // with the recommended option's settings
  std::string shortfall;  // empty: it fits
};

/// Something that wears the drives less than the recommended option does.
struct WearLess {
  std::string how;  // "state format q8", "accumulation = 64"
  double drive_life_days = 0;
};

struct Plan {
  ModelShape model;
  Machine machine;
  TrainingUse use;                  // the use that the options are planned for
  std::vector<PlanOption> options;  // fastest first among those that fit, then the others
  size_t recommended = 0;           // exact and fastest, or what was asked for; index into options
  bool fits = false;
  std::vector<UseNeed> uses;         // every program, whether it fits or not
  std::vector<std::string> fitting;  // settings that would make it fit; empty when it does
  std::vector<Purchase> purchases;   // for the recommended option, best first
  /// Seconds of the recommended option's step by what runs beside its update, of what `use` can do.
  std::vector<std::pair<plan::Overlap, double>> overlaps;
  bool overlap_asked = false;
  std::vector<WearLess> wear_less;  // where drives last for less than a year

  const PlanOption& best() const { return options[recommended]; }
};

struct PlanRequest {
  StepOptions options;  // sizes, optimizer, accumulation; with `requested` method and format, too
  bool requested = false;  // that method and format are tried, too, and are what is recommended
  /// Not given: late for `smartinf train`, whose "auto" is never slower, and none for the Python
  /// package, which has to be asked. What an option cannot do is planned as the next below.
  std::optional<plan::Overlap> overlap;
  /// Empty: the first that fits of `smartinf train` (where it can train the model), the Python
  /// package, and the Python package with release_gradients; the first where none does.
  std::optional<plan::TrainingProgram> program;
};

/// Tries every method the devices can do and the state formats, of what `smartinf train` and the
/// Python package can run. Errors: those of simulate_step; those of check_train_can where only
/// `smartinf train` is asked for, or several ranks, which are its own.
base::Result<Plan> make_plan(const ModelShape& model, const Machine& machine,
                             const PlanRequest& request);

/// Ok, or what of a model `smartinf train` has not, also from a folder (model.from): kUnsupported,
/// in the words of model::read_config, which it asks.
base::Status check_train_can(const ModelShape& model);

/// Whether the recipe's own keys (model.layers, ...) make the model, without a folder.
bool keys_say(const ModelShape& model);

/// Of the drive that wears fastest, where a step writes so many bytes to each; 0: endurance is not
/// known.
double drive_life_days(const Machine& machine, double written_bytes, double step_s);
/// In the currency of the machine's prices; 0: none are given.
double cost_per_second(const Machine& machine, double drive_life_days);

/// How the ranks of a recipe are started: torchrun's line, on each machine; empty for one rank.
std::string launch_line(const StepOptions& options, std::string_view recipe);

/// A recipe for `smartinf train`: model.from, or every key of the model; engine and devices. Data
/// and paths are to be filled in. data: a file of the user's. Errors: as check_train_can;
/// kOutOfMemory where train would not fit.
base::Result<std::string> plan_recipe(const Plan& plan, const std::string& data = {});

/// "devices update, overlapped": a method in words; what its short name means.
std::string_view method_words(Method method);
std::string_view method_meaning(Method method);
/// "7.24 billion parameters, 1.1 billion of them for each token".
std::string parameters_text(const ModelShape& model);
/// "7 days"; "-" where endurance is not known.
std::string drive_life_text(double days);
constexpr double kFewDays = 60;
constexpr double kYearDays = 365;
/// Its drives are worn out soon.
inline bool wears_soon(const PlanOption& option) {
  return option.drive_life_days > 0 && option.drive_life_days < kFewDays;
}

/// "24 of 34 units from the devices, 8 from the host's memory"; empty where all weights stay where
/// the model computes.
std::string streamed_text(const MemoryNeed& need);

/// "fits", "fits: 24 of 34 units from the devices", or what lacks.
std::string fit_text(const UseNeed& one);

/// Fits or not, and how; then, a sentence or two each, what else to know before training.
struct PlanResult {
  std::string headline;
  std::vector<std::string> remarks;
  std::string text() const;  // all of it
};
PlanResult plan_result(const Plan& plan);

}  // namespace smartinf::sim
