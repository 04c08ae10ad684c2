// The order in which the stages of a pipeline compute a step's micro batches: one forward, one
// backward (Narayanan et al., SOSP 2019), with so many micro batches under way that messages
// between stages are hidden. Pure.
//
//   stage 0   F0 F1 F2    B0 F3 B1 F4 B2 .. B3 B4
//   stage 1      F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
//
// A head that is the embedding's matrix may be the first stage's (folded): it is then behind the
// last stage, which sends its hidden states to the first one, and gets their gradients. H is its
// forward and backward:
//
//   stage 0   F0 F1 H0 F2 H1    B0 F3 H2 B1 F4 H3 B2 H4 B3 B4
//   stage 1      F0    F1    B0    F2    B1 F3    B2 F4 B3 B4
//
// Stages whose weights come from devices have their units in chunks, which the stages take by
// turns, and each chunk does all micro batches before the next one (breadth first, as Lamy-Poirier
// 2022), so that its weights are needed once in each direction. Of two chunks a and b:
//
//   stage 0   Fa0 Fa1 Fa2 Fb0 Fb1 Fb2         Bb0 Bb1 Bb2 Ba0 Ba1 Ba2
//   stage 1       Fa0 Fa1 Fa2 Fb0 Fb1 Fb2 Bb0 Bb1 Bb2 Ba0 Ba1 Ba2
#pragma once

#include <cstdint>
#include <vector>

namespace smartinf::plan {

/// Forward or backward of one stage, or one chunk of it, for one micro batch. Forward awaits the
/// output of the stage before for that micro batch, and sends its own to the stage behind; backward
/// awaits the gradient of that, and sends its own to the stage before. Before a chunk of the first
/// stage is the chunk before of the last one. A folded head is a chunk of the first stage.
struct PipelineAction {
  enum class Kind : uint8_t { kForward, kBackward };
  Kind kind = Kind::kForward;
  uint64_t micro_batch = 0;
  uint32_t chunk = 0;

  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};

/// Micro batches that may be under way beyond the stages behind, for each of these. None: every
/// exchange is waited for. With two the exchange of a message that takes no longer than forward and
/// backward of a micro batch is hidden.
inline constexpr uint32_t kPipelineAheadMax = 2;

/// Micro batches between the begin of their forward and the end of their backward, at most, on a
/// stage of `stages`, in a step of `micro_batches`. folds: the head is folded.
uint64_t pipeline_in_flight(uint32_t stages, uint32_t stage, uint64_t micro_batches, uint32_t ahead,
                            bool folds = false);

/// The actions of a stage. Both forwards and backwards come in ascending order of micro batches, so
/// that sums of gradients have the bits of one process; `ahead` is the same on all stages. A folded
/// head is chunk 1 of the first one; its forward awaits hidden states, and computes nothing.
std::vector<PipelineAction> pipeline_actions(uint32_t stages, uint32_t stage,
                                             uint64_t micro_batches, uint32_t ahead,
                                             bool folds = false);

/// The actions of any stage of so many chunks. Micro batches ascend in each direction and chunk.
std::vector<PipelineAction> looped_actions(uint32_t chunks, uint64_t micro_batches);

}  // namespace smartinf::plan
