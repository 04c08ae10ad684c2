// The memory of a training step at its peak, on the accelerator and in the host's memory, for
// `smartinf train` and for the Python package, and what of a model stays there: the same functions
// for the trainer and for `smartinf plan`. docs/simulator.md says how these numbers were held
// against measured peaks.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/status.h"
#include "smartinf/base/units.h"
#include "smartinf/plan/unit.h"

namespace smartinf::plan {

/// A decoder-only transformer as memory sees it. Counts of elements.
struct TrainingModel {
  uint64_t parameters = 0;
  uint64_t adapters = 0;  // parameters beside them, which alone are trained; 0: all are trained
  uint64_t largest_parameter = 0;
  uint64_t layers = 0;
  uint64_t width = 0;
  uint64_t heads = 0;
  uint64_t query_width = 0;  // heads x the head's width
  uint64_t kv_width = 0;
  uint64_t mlp_width = 0;
  uint64_t vocabulary = 0;  // 0: no logits
  uint64_t tokens = 0;      // of one micro batch
  bool gated = true;        // the Llama architecture; false: two feed-forward matrices and biases
  bool tied = false;        // the output head is the embedding
};

enum class TrainingProgram : uint8_t {
  kTrain,   // `smartinf train`
  kPython,  // the Python package, with a model of transformers under its Trainer
};

/// The values of a forward that stay until backward. kAuto: kKeep if there is memory for it, else
/// kRecompute, with room to offload what the first steps show to be faster to bring back than to
/// compute again.
enum class Activations : uint8_t {
  kAuto,
  kKeep,       // all that backward needs
  kRecompute,  // each unit's input; backward computes the rest again
  kOffload,    // all that backward needs, stored on the devices
};
inline constexpr std::array<std::string_view, 4> kActivationsNames{"auto", "keep", "recompute",
                                                                   "offload"};
constexpr base::EnumNames enum_names(Activations) { return kActivationsNames; }

/// Rows of [tokens, vocabulary] whose logits `smartinf train` makes at once: f32 logits of 64 MiB.
/// It follows from shapes alone, so that bits do not depend on memory.
uint64_t head_rows(uint64_t vocabulary);

/// Assumed, not measured: the CUDA context with its kernels and the workspaces of its libraries.
inline constexpr uint64_t kCudaBytes = 600 * base::kMiB;
/// Host memory of a process with torch (2.15 on x86-64), whatever the model and without a GPU;
/// fitted to docs/results/plan_memory.md. The second one is a part of it: what torch touches of its
/// libraries, and takes, when it first computes.
inline constexpr uint64_t kTorchBytes = 181'000'000;
inline constexpr uint64_t kLoadedLaterBytes = 48'000'000;
/// Host memory of torch's libraries for GPUs: where there is a GPU, and in every Python process.
inline constexpr uint64_t kTorchGpuBytes = 243'000'000;

/// A moment of a step at which a micro batch goes back, of a stage of a pipeline.
struct BackwardMoment {
  uint64_t in_flight = 1;   // micro batches whose activations there are, with this one
  bool head = true;         // it goes through the head, if that is here...
  bool layers = true;       // ...and through all else
  bool head_summed = true;  // there are sums of gradients of micro batches before it
  bool layers_summed = true;
};

struct TrainingMemoryInput {
  TrainingModel model;
  TrainingProgram program = TrainingProgram::kTrain;
  bool gpu = false;  // the model computes on a GPU; else everything is host memory
  uint64_t gpu_library_bytes = kCudaBytes;  // of the GPU's memory, beside what follows from shapes
  uint32_t value_bytes = 2;                 // of weights, activations and gradients
  bool recompute = true;                    // activations: only each unit's input is kept
  uint32_t accumulation = 1;                // micro batches of a step
  uint32_t ranks = 1;                       // kTrain: processes that share them
  std::vector<BackwardMoment> moments;  // kTrain, a stage: of a step. Empty: each micro batch goes
                                        // back before the next one comes
  uint64_t messages = 0;  // a stage: of micro batches on their way, of a unit's input each
  bool sums_by_tree = false;        // kTrain, one process: it adds gradients as several ranks do
  bool release_gradients = false;   // kPython: each gradient leaves once it is complete
  uint32_t unit_layers = 1;         // kTrain, without `units`: of a unit, at most
  uint64_t unit_elements = 0;       // likewise
  uint64_t embedding_elements = 0;  // likewise
  uint64_t optimizer_bytes = 0;     // the engine's buffers and gradients; with
                                    // optimizer.where = "memory" torch's own state
  uint64_t process_bytes = 0;       // resident before there is a model
  bool measures_drives = true;      // at the start, which takes memory of its own

  /// kTrain where each unit does all micro batches before the next one: not all units stay where
  /// the model computes, or activations are offloaded. Empty: micro batch by micro batch, and all
  /// units stay.
  std::vector<Unit> units;
  /// Units whose weights and gradients there are at once, where they come in chunks of a pipeline's
  /// stage; 0: in no chunks, one.
  uint32_t chunk_units = 0;
  uint32_t staying_units = 0;  // of the first ones, which cannot come from the devices
  UnitPlacement placement;
  uint64_t inputs_in_memory = 0;    // of units and micro batches; the others are on the devices
  uint64_t slot_padding_bytes = 0;  // bytes of a slot beyond its unit's weights
  uint64_t gradient_copies_elements = 0;  // kTrain on a GPU: as the function below has it
  uint64_t saved_in_memory = 0;  // offloading: of units and micro batches, what autograd keeps...
  uint64_t saved_bytes = 0;      // ...of each, at most
  bool saves_all = true;         // false: some units may be computed again all the same
};

struct MemoryPart {
  const char* name;  // a literal
  uint64_t bytes = 0;
};

uint64_t total_bytes(std::span<const MemoryPart> parts);

/// "weights 2.38 GiB, gradients 540 MiB": those that take anything.
std::string describe_parts(std::span<const MemoryPart> parts);

struct TrainingMemory {
  std::vector<MemoryPart> accelerator;  // empty without a GPU
  std::vector<MemoryPart> host;
  uint64_t accelerator_bytes = 0;
  uint64_t host_bytes = 0;
};

/// Bytes that autograd keeps of one layer for backward where nothing is computed again.
uint64_t layer_saved_bytes(const TrainingModel& model, TrainingProgram program,
                           uint32_t value_bytes);

/// Elements of the memory through which gradients leave a GPU for the host: those of a unit, which
/// backward makes at once. Pure.
uint64_t gradient_copies_elements(const TrainingModel& model, std::span<const Unit> units);

/// Alignment of the parts of a layer that are offloaded, as torch aligns tensors; kSavedTensors of
/// them at most.
inline constexpr uint64_t kSavedAlignment = 64;
inline constexpr uint64_t kSavedTensors = 32;

/// The peak of a step. Pure.
TrainingMemory training_memory(const TrainingMemoryInput& input);

struct TrainingPlanInput {
  /// recompute, placement and inputs_in_memory are chosen; units is the model's; optimizer_bytes is
  /// without gradients.
  TrainingMemoryInput memory;
  /// Bytes that the optimizer's buffers take more where weights come from the devices, and where
  /// not all gradients stay in memory either.
  uint64_t stream_bytes = 0;
  uint64_t spill_bytes = 0;
  Activations activations = Activations::kAuto;
  uint64_t host_limit_bytes = ~uint64_t{0};
  uint64_t accelerator_limit_bytes = ~uint64_t{0};
  uint64_t gradient_bytes = 0;                   // of all gradients, on the way to their update
  uint64_t gradient_limit_bytes = ~uint64_t{0};  // of them in memory: engine.gradient_budget
  /// Why weights and activations cannot come from the devices; ok: they can.
  base::Status streams;
  bool spools = true;  // false: weights can, activations cannot
};

struct TrainingPlan {
  uint32_t units = 0;  // that are placed
  UnitPlacement placement;
  bool recompute = false;
  bool streams = false;                // each unit does all micro batches before the next one
  uint64_t gradient_memory_bytes = 0;  // gradients beyond this are spilled
  /// Gradients may wait, beside `memory`, for the commit of the step before: there is room for them
  /// all. Else backward waits.
  bool gradients_wait = false;
  uint64_t inputs_in_memory = 0;   // of units and micro batches, where recompute
  uint64_t inputs_spooled = 0;     // the others: on the devices
  uint64_t spool_bytes = 0;        // room for them
  uint64_t input_bytes = 0;        // of each
  uint64_t saved_in_memory = 0;    // of what autograd keeps of units and micro batches...
  uint64_t saved_bytes = 0;        // ...buffers of so many bytes; 0: it is computed again
  uint64_t saved_spool_bytes = 0;  // of spool_bytes
  bool measures_offload = false;   // the first steps show how much of it to offload; with
                                   // without_offload() nothing
  TrainingMemory memory;
};

/// Keeps in memory what fits: everything if it can; else first the inputs of units, then gradients,
/// then the weights of the first units. kAuto has the least buffers for offloading where these fit,
/// and more of them from what the others leave. Where nothing fits it is the smallest plan that
/// input.activations and input.streams allow. Pure.
TrainingPlan place_training(const TrainingPlanInput& input);

/// The same plan where everything is computed again: the devices have no room for more.
TrainingPlan without_offload(TrainingPlan plan);

/// Whether a plan keeps to the limits.
bool fits(const TrainingMemory& memory, const TrainingPlanInput& input);

/// The plan of place_training. Errors: kOutOfMemory with what the smallest plan needs, part by
/// part, and what was allowed.
base::Result<TrainingPlan> plan_training(const TrainingPlanInput& input);

}  // namespace smartinf::plan
