// What a training step holds in memory at its peak, on the accelerator and in the host's memory,
// for `smartinf train` and for the Python package. Neither streams weights yet: all of them are
// where the model computes. docs/simulator.md says how these numbers were held against measured
// peaks.
#pragma once

#include <cstdint>
#include <vector>

namespace smartinf::plan {

/// A decoder-only transformer as memory sees it. Counts of elements.
struct TrainingModel {
  uint64_t parameters = 0;
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

struct TrainingMemoryInput {
  TrainingModel model;
  TrainingProgram program = TrainingProgram::kTrain;
  bool gpu = false;          // the model computes on a GPU; else everything is host memory
  uint32_t value_bytes = 2;  // of weights, activations and gradients
  bool recompute = true;     // activations: only each layer's input is kept
  uint32_t accumulation = 1;
  bool release_gradients = false;  // kPython: each gradient leaves once it is complete
  uint64_t optimizer_bytes = 0;    // the engine's buffers and gradients; with
                                   // optimizer.where = "memory" torch's own state
  uint64_t process_bytes = 0;      // resident before there is a model
};

struct MemoryPart {
  const char* name;  // a literal
  uint64_t bytes = 0;
};

struct TrainingMemory {
  std::vector<MemoryPart> accelerator;  // empty without a GPU
  std::vector<MemoryPart> host;
  uint64_t accelerator_bytes = 0;
  uint64_t host_bytes = 0;
};

/// Bytes that autograd keeps of one layer for backward where nothing is computed again.
uint64_t layer_saved_bytes(const TrainingModel& model, TrainingProgram program,
                           uint32_t value_bytes);

/// The peak of a step. Pure.
TrainingMemory training_memory(const TrainingMemoryInput& input);

}  // namespace smartinf::plan
