// What a stage of a pipeline computes and needs: for the trainer and for `smartinf plan`. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/plan/stages.h"
#include "smartinf/plan/training_memory.h"

namespace smartinf::plan {

/// Begins of stages of equal computing, as far as whole units allow; or of the stages that `split`
/// names: their numbers of layers, "9, 8, 8, 7". Errors: kInvalidArgument for more stages than
/// units, and for a split of another number of stages or layers, or within a unit.
base::Result<std::vector<uint32_t>> divide_units(const StageCosts& model, uint32_t stages,
                                                 std::string_view split = {});

/// What a rank of a pipeline has of the model, and how much of it at once: in place of the whole
/// model and all ranks. memory.units are the model's.
void take_stage(const Pipeline& pipeline, TrainingMemoryInput& memory);

/// What becomes of activations with some number of micro batches ahead.
enum class AheadCost : uint64_t { kKeeps, kRecomputes, kDoesNotFit };
/// The most micro batches ahead for which no rank has to do more than with none. costs: of each
/// rank from none to kPipelineAheadMax, rank after rank.
uint32_t most_ahead(std::span<const AheadCost> costs);

}  // namespace smartinf::plan
