// The processor that a model computes on.
#pragma once

#include <string>

#include <torch/types.h>

#include "smartinf/base/status.h"
#include "smartinf/train/memory_plan.h"

namespace smartinf::train {

/// key: what `name` is the value of, for messages. "auto": the accelerator that torch has here,
/// else the CPU. Of several accelerators the ranks of a machine take one each, in their order.
/// Errors: kUnsupported where there is none of that name.
base::Result<torch::Device> choose_accelerator(const char* key, const std::string& name,
                                               uint32_t local_rank = 0);

/// Torch rounds pinned memory up to a power of two, unless it is told: too much for a buffer of all
/// weights. Before the first is allocated.
void pin_what_is_asked_for();

AcceleratorMemory memory_of(const torch::Device& accelerator);

}  // namespace smartinf::train
