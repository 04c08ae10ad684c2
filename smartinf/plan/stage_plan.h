// What a stage of a pipeline computes and needs: for the trainer and for `smartinf plan`. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/plan/parameter_space.h"
#include "smartinf/plan/rank_share.h"
#include "smartinf/plan/stages.h"
#include "smartinf/plan/training_memory.h"

namespace smartinf::plan {

/// Begins of stages of equal computing, as far as whole units allow; or of the stages that `split`
/// names: their numbers of layers, "9, 8, 8, 7". folds: the head is the first stage's, a part more.
/// Errors: kInvalidArgument for more stages than units, and for a split of another number of stages
/// or layers, within a unit, or with a stage of none.
base::Result<std::vector<uint32_t>> divide_units(const StageCosts& model, uint32_t stages,
                                                 std::string_view split = {}, bool folds = false);
/// Of the divisions in which no stage has more units than it has memory for the one of most equal
/// computing; empty: there is none. most_units(stage, first): units from that one on, at most.
std::vector<uint32_t> divide_units_by_memory(
    const StageCosts& model, uint32_t stages, bool folds,
    const std::function<uint32_t(uint32_t, uint32_t)>& most_units);

/// Divides units as split_units() does, but so that the sum of two numbers is least: the largest
/// `each` of a stage, its computing, and the largest `once`, which all stages wait for.
std::vector<uint32_t> split_units(uint32_t units, uint32_t stages, const StageCost& each,
                                  const StageCost& once);

/// A head that is the embedding's matrix, and a step.
struct TiedHead {
  uint64_t vocabulary = 0;
  uint64_t width = 0;
  uint64_t tokens = 0;  // of a step, of all replicas
  uint32_t value_bytes = 2;
  uint32_t replicas = 1;
};
/// Whether fewer bytes go between stages in a step where the first one computes the head: hidden
/// states to it and their gradients back, in place of a copy's sums in f32 and its new weights.
bool head_folds(const TiedHead& head);

/// What a rank of a pipeline has of the model, and how much of it at once: in place of the whole
/// model and all ranks. memory.units are the model's.
void take_stage(const Pipeline& pipeline, TrainingMemoryInput& memory);

/// What a rank of a pipeline has of the state of a run, and exchanges with other ranks.
struct StageState {
  uint64_t elements = 0;   // that the stage computes with
  bool is_own = true;      // its ranks have the state of these
  uint64_t of_others = 0;  // elements on its ranks' devices that only other stages compute with
  RankExchange exchange;
};
/// units: the model's. tied: elements of the head that is the embedding. subgroups: of the run, at
/// most, of so many elements. held: subgroups on devices of the stage's ranks, of a run that goes
/// on; none: it begins, and each stage's state comes to its own ranks (plan::place_by_stage).
StageState stage_state(const Pipeline& pipeline, std::span<const Unit> units, uint64_t tied,
                       uint64_t subgroup_elements, std::span<const Subgroup> held = {});

/// What becomes of activations with some number of micro batches ahead.
enum class AheadCost : uint64_t { kKeeps, kRecomputes, kDoesNotFit };
/// The most micro batches ahead for which no rank has to do more than with none, or where some rank
/// has no memory for none (sums of gradients are there earlier), for which all have memory; 0:
/// there are none. costs: of each rank from none to kPipelineAheadMax, rank after rank.
uint32_t most_ahead(std::span<const AheadCost> costs);

}  // namespace smartinf::plan
