// Division of blocks that train apart among ranks, as blockwise distillation has it: a stage is
// some neighbouring blocks and the ranks that share its micro batches, its replicas. Pure.
// Source: Jang et al., Pipe-BD, DATE 2023 (automatic hybrid distribution), for any number of blocks
// and ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::plan {

/// A block's costs for one step's micro batches, on one rank alone.
struct BlockCost {
  double teacher_s = 0;  // forward
  double student_s = 0;  // forward, backward
  uint64_t memory_bytes = 0;
  uint64_t gradient_bytes = 0;  // that replicas add up
  double update_s = 0;          // which replicas do not share
};

/// What the ranks have.
struct BlockRanks {
  uint32_t ranks = 1;
  uint64_t memory_bytes = 0;      // of each; 0: no limit
  double link_bytes_per_s = 0;    // between two of them; 0: no time
  uint64_t activation_bytes = 0;  // of a step, from one block to the next
  double loading_s = 0;           // of a step's data, by the first stage
  uint64_t micro_batches = 0;     // of a step, whole ones of which a replica has; 0: any share
};

struct BlockStage {
  uint32_t first = 0;  // blocks [first, end)
  uint32_t end = 0;
  uint32_t ranks = 1;
  double seconds = 0;  // of a step
};

/// Seconds of a step: replicas share computing and loading, add up gradients in a ring, and send
/// activations to the next stage. The one with most micro batches decides.
double block_stage_seconds(std::span<const BlockCost> blocks, const BlockRanks& ranks,
                           uint32_t first, uint32_t end, uint32_t replicas);

/// Stages whose slowest one is as fast as can be, on at most so many ranks; of equal ones those of
/// fewer ranks, then with fewer blocks in front. No stage has more ranks than micro batches. Takes
/// U^2 R^2 sums for U blocks and R ranks. blocks: not empty. Errors: kOutOfMemory where a block
/// does not fit on a rank.
base::Result<std::vector<BlockStage>> divide_blocks(std::span<const BlockCost> blocks,
                                                    const BlockRanks& ranks);

}  // namespace smartinf::plan
