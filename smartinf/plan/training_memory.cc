#include "smartinf/plan/training_memory.h"

#include <algorithm>

#include "smartinf/base/units.h"

namespace smartinf::plan {
namespace {

// Measuring the drives takes this for a while (storage/tuning.cc), before torch has loaded all of
// what training needs of it, which process_bytes holds.
constexpr uint64_t kTuningBytes = 256 * base::kMiB;
constexpr uint64_t kLoadedLaterBytes = 32 * base::kMiB;

// Assumed, not measured: the CUDA context with its kernels and the workspaces of its libraries.
constexpr uint64_t kCudaBytes = 600 * base::kMiB;

// What lies beside weights and optimizer in one phase of forward and backward.
struct Phase {
  uint64_t activations = 0;
  uint64_t gradients = 0;
  uint64_t logits = 0;
  uint64_t total() const { return activations + gradients + logits; }
};

uint64_t total(const std::vector<MemoryPart>& parts) {
  uint64_t bytes = 0;
  for (const MemoryPart& part : parts) bytes += part.bytes;
  return bytes;
}

Phase peak_of_backward(const TrainingMemoryInput& input) {
  const TrainingModel& model = input.model;
  const uint64_t value_bytes = input.value_bytes;
  const bool released = input.program == TrainingProgram::kPython && input.release_gradients;
  const uint64_t saved = layer_saved_bytes(model, input.program, input.value_bytes);
  // Gradients between a layer's feed-forward products.
  const uint64_t backward = model.tokens * value_bytes * (model.gated ? 6 : 4) * model.mlp_width;
  const uint64_t inputs = model.layers * value_bytes * model.tokens * model.width;
  const uint64_t kept = input.recompute ? inputs : model.layers * saved;
  const uint64_t all = value_bytes * model.parameters;
  const uint64_t largest = value_bytes * model.largest_parameter;
  const uint64_t head = value_bytes * model.vocabulary * model.width;
  // In the Python package the sums of earlier micro batches are the gradients themselves, which
  // stay where they are; each new one is added and freed.
  const bool sums_are_gradients =
      input.program == TrainingProgram::kPython && input.accumulation > 1 && !released;
  const uint64_t before = sums_are_gradients ? all : 0;

  // Backward begins: the logarithms of the chances, and gradients of them and of the logits, in
  // f32. What the logarithms were made of is gone.
  const Phase loss{kept, before, model.tokens * model.vocabulary * 3 * 4};
  // Then the last layer's, with its values computed once more where they were not kept, and the
  // head's gradient; ...
  const uint64_t again = input.recompute ? saved : 0;
  const Phase last{kept + again + backward, before + head, 0};
  // ...and the first layer's, with the gradients of all others. Of released ones the largest is
  // left; a tied head's waits for the embedding's, and both are there when they are added.
  Phase first{saved + backward, all, 0};
  if (released) first.gradients = model.tied ? 2 * largest : largest;
  if (sums_are_gradients) first.gradients = all + largest;
  return std::max({loss, last, first},
                  [](const Phase& a, const Phase& b) { return a.total() < b.total(); });
}

}  // namespace

uint64_t layer_saved_bytes(const TrainingModel& model, TrainingProgram program,
                           uint32_t value_bytes) {
  const uint64_t query = model.query_width;
  const uint64_t kv = model.kv_width;
  // Korthikanti et al. 2022, section 4.1, without the scores, which no fused attention keeps.
  if (!model.gated) return model.tokens * 17 * value_bytes * model.width;
  const bool ours = program == TrainingProgram::kTrain;
  // A norm: its input in f32, one factor, what is normalized (in f32 in our trainer, in the model's
  // own type in transformers), and the product with its weight.
  const uint64_t norm = model.width * (4 + (ours ? 4 : value_bytes) + value_bytes) + 4;
  // Rotated query and key, value, result. Our trainer has query, key and value in one tensor, kept
  // by the value's view.
  const uint64_t attention =
      value_bytes * ((ours ? query + 2 * kv : kv) + query + kv + query) + 4 * model.heads;
  // Gate and up, what SiLU makes of the gate, the product of both.
  const uint64_t forward = value_bytes * 4 * model.mlp_width;
  return model.tokens * (2 * norm + attention + forward);
}

TrainingMemory training_memory(const TrainingMemoryInput& input) {
  const TrainingModel& model = input.model;
  const bool python = input.program == TrainingProgram::kPython;
  const uint64_t weights = input.value_bytes * model.parameters;
  const Phase phase = peak_of_backward(input);
  const bool accumulates = input.accumulation > 1;
  std::vector<MemoryPart> computing{{"weights", weights},
                                    {"gradients", phase.gradients},
                                    {"activations", phase.activations},
                                    {"logits and their gradients", phase.logits}};
  if (!python && accumulates) {
    computing.push_back({"sums of gradients in f32", 4 * model.parameters});
  }
  TrainingMemory memory;
  if (input.gpu) {
    memory.accelerator = std::move(computing);
    memory.accelerator.push_back({"CUDA itself (assumed)", kCudaBytes});
    // New weights arrive in a flat buffer; gradients leave one by one.
    memory.host.push_back({"weights", weights});
    memory.host.push_back({"a gradient on its way", input.value_bytes * model.largest_parameter});
  } else {
    memory.host = std::move(computing);
  }
  memory.host.push_back({"optimizer: buffers and gradients", input.optimizer_bytes});
  if (python && input.release_gradients && accumulates) {
    memory.host.push_back({"sums of released gradients in f32", 4 * model.parameters});
  }
  memory.host.push_back({"the process itself", input.process_bytes});
  memory.host_bytes =
      std::max(total(memory.host), input.process_bytes + kTuningBytes - kLoadedLaterBytes);
  memory.accelerator_bytes = total(memory.accelerator);
  return memory;
}

}  // namespace smartinf::plan
