// One training step on a machine: who moves how many bytes where, and how long it takes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/plan/schedule.h"
#include "smartinf/plan/unit.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/model_shape.h"

namespace smartinf::sim {

/// The paper's names, as users type them.
enum class Method : uint8_t {
  kBaseline,   // host update; state crosses the host link, drives as one RAID0
  kSmart,      // update on the devices, one subgroup after another
  kSmartOver,  // ... with the overlapped transfer handler
  kSmartComp,  // ... with compressed gradients
};
inline constexpr std::array<std::string_view, 4> kMethodNames{"baseline", "su", "su+o", "su+o+c"};
constexpr base::EnumNames enum_names(Method) { return kMethodNames; }
constexpr std::string_view method_name(Method method) { return base::enum_name(method); }

/// When gradients leave for where they are updated.
enum class GradientsLeave : uint8_t {
  kAsCompleted,  // each once it is complete, in the last micro batch: `smartinf train`
  kEveryPass,    // each in every micro batch: the Python package with release_gradients
  kTogether,     // when backward has made all of them: the Python package
};

// Where the weights are while the model computes.

/// As the paper's stack: each layer's weights are fetched for its forward and again for its
/// backward. One micro batch in a step.
struct PaperStep {};

/// As the Python package works, and `smartinf train` where there is memory for it: all weights stay
/// on the GPU and go there once, when they are new.
struct ResidentStep {
  GradientsLeave gradients = GradientsLeave::kAsCompleted;
};

/// Where not all weights stay where the model computes (plan::TrainingPlan): each unit does all
/// micro batches of a step before the next one. Where the devices update.
struct StreamedStep {
  std::vector<plan::Unit> units;  // of the whole model
  plan::UnitPlacement placement;
  bool inputs_near = true;      // inputs of units stay where the model computes
  uint64_t input_bytes = 0;     // of a unit and a micro batch
  uint64_t inputs_spooled = 0;  // of those of the first units: on the drives
};

struct StepOptions {
  Method method = Method::kSmartOver;
  kernels::UpdateRule rule = kernels::UpdateRule::kAdamW;
  base::StateFormat format = base::StateFormat::kF32;
  /// Bytes of compressed gradients over bytes in f32, in (0, 1], as the paper counts them: 8 for
  /// each number of Top-K. Signs, with 1 for each, are then of 4 times this share of the elements.
  double ratio = 0.02;
  /// Steps between writes of the residual by the host that compresses; 0: it is never written.
  uint32_t residual_every = 16;
  plan::Overlap overlap = plan::Overlap::kNone;  // not kAuto
  /// With kEarly: at the end of backward gradients turn out to be clipped, and all is done again.
  bool wrong_guess = false;
  uint64_t subgroup_elements = 0;  // 0: the machine's software says
  uint32_t slots = 0;              // likewise
  bool trace = false;              // keep spans
  bool recompute = true;           // backward computes each layer again from its input
  uint32_t value_bytes = 2;        // of the trainer's weights and activations: only for its memory
  std::variant<PaperStep, ResidentStep, StreamedStep> weights;
  uint64_t gradient_memory_bytes = ~uint64_t{0};  // gradients beyond it are spilled; ~0: none
  uint32_t accumulation = 1;  // but for PaperStep: micro batches (ModelShape::batch) in a step
  /// Processes of `smartinf train`, which share its micro batches and the devices (docs/ranks.md),
  /// as many on each machine; each machine is the one described, with devices of its own.
  uint32_t ranks = 1;
  uint32_t machines = 1;
  uint32_t devices = 0;  // of all machines, where these are not alike; 0: as many on each
  /// Bytes of a parameter in what a rank sends of its gradients, compressed (compress.density);
  /// 0: it sends sums.
  double compressed_gradient_bytes = 0;
  /// Bytes of state that stay in the memory of whoever updates, all devices together; it is written
  /// as ever, but not read from the drives.
  uint64_t state_cache_bytes = 0;

  const ResidentStep* resident() const { return std::get_if<ResidentStep>(&weights); }
  const StreamedStep* streamed() const { return std::get_if<StreamedStep>(&weights); }
};

/// Whether gradients are compressed, and on the host's cores instead of the GPU.
inline bool host_selects(const Machine& machine, const StepOptions& options) {
  return options.method == Method::kSmartComp && machine.host.select_params_per_s > 0;
}

/// Bytes of the step's gradients that wait on the drives for their update.
uint64_t spilled_gradient_bytes(const Machine& machine, const StepOptions& options,
                                uint64_t parameters);

/// Bytes per parameter that stay on the drive for an optimizer in a format, exact for f32 and bf16;
/// q8 with its scales.
double state_bytes_per_parameter(kernels::UpdateRule rule, base::StateFormat format);

/// Bytes of one step, all devices and GPUs together; of several ranks those of one. They follow
/// from the graph that was run.
struct StepBytes {
  uint64_t host_link_up = 0;    // towards the host
  uint64_t host_link_down = 0;  // towards the devices
  uint64_t drive_read = 0;
  uint64_t drive_written = 0;  // by the host or the processor; without amplification
  uint64_t gpu_link_up = 0;    // gradients, to the host
  uint64_t gpu_link_down = 0;  // weights, to the GPU
  uint64_t ranks_sent = 0;     // gradients and weights, to other ranks
  uint64_t ranks_received = 0;
};

struct Span {
  std::string lane;
  std::string name;
  double start_s = 0;
  double end_s = 0;
};

struct Utilization {
  std::string resource;  // "drives", "host link up", "GPU", ...
  double share = 0;      // of the phase, of the busiest of its kind
};

struct StepTimes {
  double forward_s = 0;
  double backward_s = 0;  // with gradient offload
  double update_s = 0;    // the part of it that no other phase hides
  double total_s = 0;
  std::string bound_by;                                // the busiest resource of the longest phase
  std::vector<Utilization> forward, backward, update;  // busiest first
  StepBytes bytes;
  uint64_t parameters = 0;
  uint64_t events = 0;      // tasks simulated
  std::vector<Span> spans;  // when traced, in order of start
};

/// Tokens of a step, of all ranks or GPUs.
uint64_t step_tokens(const ModelShape& model, const Machine& machine, const StepOptions& options);

/// Ok, or why a step's update cannot run as `options.overlap` says: kUnsupported.
base::Status check_overlap(const Machine& machine, const StepOptions& options);

/// What a rank does in a step that keeps all weights where it computes, one thing after another.
struct StageTimes {
  double forward_s = 0;     // of a micro batch
  double backward_s = 0;    // likewise
  double exchange_s = 0;    // behind the last backward: gradients to other ranks and to the devices
  double update_s = 0;      // until the new weights are there
  double update_cores = 0;  // share of computing's time that the update takes meanwhile
  double sync_s = 0;        // behind it
  double read_s = 0;        // all its weights from the devices, where no update hands them out
  double fetch_s = 0;       // and to a GPU
  StepBytes bytes;
  std::string bound_by;  // the update
};
/// Seconds of forward and of backward of a micro batch, alone, on one rank.
std::pair<double, double> computing_s(const ModelShape& model, const Machine& machine,
                                      const StepOptions& options);
/// Errors: simulate_step's.
base::Result<StageTimes> stage_times(const ModelShape& model, const Machine& machine,
                                     StepOptions options);

/// Simulates one step in the steady state, of several ranks that of the one with the most devices
/// and micro batches. Pure; deterministic to the bit.
/// Errors: kInvalidArgument for a model, machine or option that cannot be, with the reason;
/// kUnsupported for SmartUpdate on devices without a processor, and as check_overlap and
/// check_ranks (one_rank.h).
base::Result<StepTimes> simulate_step(const ModelShape& model, const Machine& machine,
                                      const StepOptions& options);

}  // namespace smartinf::sim
