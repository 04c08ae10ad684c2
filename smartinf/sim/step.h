// One training step on a machine: who moves how many bytes where, and how long it takes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/model_shape.h"

namespace smartinf::sim {

/// The paper's names, as users type them.
enum class Method : uint8_t {
  kBaseline,   // "baseline": host update; state crosses the host link, drives as one RAID0
  kSmart,      // "su": update on the devices, one subgroup after another
  kSmartOver,  // "su+o": ... with the overlapped transfer handler
  kSmartComp,  // "su+o+c": ... with compressed gradients
};
std::string_view method_name(Method method);
std::optional<Method> method_from_name(std::string_view name);
std::vector<std::string_view> method_names();

enum class Optimizer : uint8_t { kAdam, kSgdMomentum, kAdagrad };
std::string_view optimizer_name(Optimizer optimizer);
std::optional<Optimizer> optimizer_from_name(std::string_view name);
std::vector<std::string_view> optimizer_names();

/// What the update may run behind.
enum class Overlap : uint8_t {
  kNothing,   // forward, backward, update, one after another: the paper
  kForward,   // the next forward starts with the first layer's new weights
  kBackward,  // a subgroup is updated as soon as its gradients are complete
  kBoth,
};
std::string_view overlap_name(Overlap overlap);
std::optional<Overlap> overlap_from_name(std::string_view name);
std::vector<std::string_view> overlap_names();

struct StepOptions {
  Method method = Method::kSmartOver;
  Optimizer optimizer = Optimizer::kAdam;
  base::StateFormat format = base::StateFormat::kF32;
  double ratio = 0.02;  // counted volume against f32 gradients (docs/smartcomp.md), in (0, 1]
  /// Steps between writes of what compression on the host holds back; 0: it is never written.
  uint32_t residual_every = 16;
  Overlap overlap = Overlap::kNothing;
  uint64_t subgroup_elements = 0;  // 0: the machine's software says
  uint32_t slots = 0;              // likewise
  bool trace = false;              // keep spans
  uint32_t value_bytes = 2;        // of the trainer's weights and activations: only for its memory
  /// As `smartinf train` and the Python package work: all weights stay on the GPU and go there
  /// once, when they are new, and gradients leave when backward has made all of them. Else as the
  /// paper's stack: each layer's weights are fetched for its forward and again for its backward.
  bool weights_stay = false;
  bool release_gradients = false;  // with weights_stay: each leaves once complete, in every pass
  uint32_t accumulation = 1;       // with weights_stay: micro batches (ModelShape::batch) in a step
  /// Of state that stays in the memory of whoever updates, all devices together; it is written as
  /// ever, but not read from the drives.
  uint64_t state_cache_bytes = 0;
};

/// Whether gradients are compressed, and on the host's cores instead of the GPU.
inline bool host_selects(const Machine& machine, const StepOptions& options) {
  return options.method == Method::kSmartComp && machine.host.select_params_per_s > 0;
}

/// Bytes per parameter that stay on the drive for an optimizer in a format, exact for f32 and bf16;
/// q8 with its scales.
double state_bytes_per_parameter(Optimizer optimizer, base::StateFormat format);

/// Bytes of one step, all devices and GPUs together. They follow from the graph that was run.
struct StepBytes {
  uint64_t host_link_up = 0;    // towards the host
  uint64_t host_link_down = 0;  // towards the devices
  uint64_t drive_read = 0;
  uint64_t drive_written = 0;  // by the host or the processor; without amplification
  uint64_t gpu_link_up = 0;    // gradients, to the host
  uint64_t gpu_link_down = 0;  // weights, to the GPU
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
  double update_s = 0;    // what of it no other phase hides
  double total_s = 0;
  std::string bound_by;                                // the busiest resource of the longest phase
  std::vector<Utilization> forward, backward, update;  // busiest first
  StepBytes bytes;
  uint64_t parameters = 0;
  uint64_t events = 0;      // tasks simulated
  std::vector<Span> spans;  // when traced, in order of start
};

/// Simulates one step in the steady state. Pure; deterministic to the bit.
/// Errors: kInvalidArgument for a model, machine or option that cannot be, with the reason;
/// kUnsupported for SmartUpdate on devices without a processor.
base::Result<StepTimes> simulate_step(const ModelShape& model, const Machine& machine,
                                      const StepOptions& options);

}  // namespace smartinf::sim
