// Memory for the part of a model that stays while it continues texts: forward alone, unit by unit.
#pragma once

#include <cstdint>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/plan/training_memory.h"
#include "smartinf/plan/unit.h"

namespace smartinf::plan {

struct InferenceMemoryInput {
  std::vector<Unit> units;
  uint32_t value_bytes = 2;  // of weights and activations
  uint64_t adapters = 0;     // elements beside the model's own
  uint64_t cache_bytes = 0;  // keys and values of all tokens
  uint64_t activation_bytes = 0;
  uint64_t source_bytes = 0;        // buffers of what weights come from
  uint64_t slot_padding_bytes = 0;  // bytes of a slot beyond its unit's weights
  uint64_t process_bytes = 0;       // resident before there is a model
  base::Status streams;             // why units cannot come from the source; ok: they can

  bool gpu = false;  // the model computes on a GPU; else everything is host memory
  uint64_t gpu_library_bytes = kCudaBytes;
  uint64_t host_limit_bytes = ~uint64_t{0};
  uint64_t accelerator_limit_bytes = ~uint64_t{0};
};

struct InferencePlan {
  UnitPlacement placement;
  TrainingMemory memory;
};

/// As many of the first units stay as fit, on the GPU and in the host's memory. Pure. Errors:
/// kOutOfMemory with what is needed at least, part by part, and what was allowed.
base::Result<InferencePlan> plan_inference(const InferenceMemoryInput& input);

/// Bytes that a batch job takes for keys and values, of `limit` bytes of which the process and the
/// weights take `taken`: three quarters of the rest, or a quarter of all where the weights do not
/// fit and are read for each step. Pure.
uint64_t key_value_room(uint64_t limit, uint64_t taken);
/// Of these, bytes with which each device reads and writes: at most `most`, at least 16 blocks, and
/// otherwise shares of a quarter with the host. Pure.
uint64_t key_value_device_bytes(uint64_t room, uint64_t devices, uint64_t block_bytes,
                                uint64_t most);

}  // namespace smartinf::plan
