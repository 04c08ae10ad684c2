// A batch of a corpus, where the model computes.
#pragma once

#include <cstdint>
#include <span>

#include <torch/types.h>

#include "smartinf/base/status.h"
#include "smartinf/train/unit_pass.h"
#include "smartinf/train/windows.h"

namespace smartinf::train {

/// [rows, sequence] of these windows. Errors: those of Windows::read().
base::Result<Batch> read_batch(const Windows& from, std::span<const uint64_t> windows,
                               uint64_t vocabulary, uint32_t sequence, torch::Device device);

}  // namespace smartinf::train
