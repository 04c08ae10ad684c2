#include "smartinf/plan/pipeline_schedule.h"

#include <algorithm>

#include "smartinf/base/check.h"

namespace smartinf::plan {

namespace {

/// Forwards of a stage between a micro batch's own and its backward.
uint64_t forwards_between(uint32_t stages, uint32_t stage, uint32_t ahead, bool folds) {
  SI_CHECK(stage < stages, "a stage that is none of the pipeline's");
  return uint64_t{stages - 1 - stage + (folds ? 1 : 0)} * (1 + ahead);
}

}  // namespace

uint64_t pipeline_in_flight(uint32_t stages, uint32_t stage, uint64_t micro_batches, uint32_t ahead,
                            bool folds) {
  return std::min(micro_batches, 1 + forwards_between(stages, stage, ahead, folds));
}

std::vector<PipelineAction> pipeline_actions(uint32_t stages, uint32_t stage,
                                             uint64_t micro_batches, uint32_t ahead, bool folds) {
  using enum PipelineAction::Kind;
  const uint64_t to_backward = forwards_between(stages, stage, ahead, folds);
  const uint64_t to_head = to_backward / 2;  // half of the way there and back
  std::vector<PipelineAction> actions;
  for (uint64_t i = 0; i < micro_batches + to_backward; ++i) {
    if (i < micro_batches) actions.push_back({kForward, i});
    if (folds && stage == 0 && i >= to_head && i - to_head < micro_batches) {
      actions.push_back({kForward, i - to_head, 1});
      actions.push_back({kBackward, i - to_head, 1});
    }
    if (i >= to_backward) actions.push_back({kBackward, i - to_backward});
  }
  return actions;
}

std::vector<PipelineAction> looped_actions(uint32_t chunks, uint64_t micro_batches) {
  using enum PipelineAction::Kind;
  std::vector<PipelineAction> actions;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    for (uint64_t i = 0; i < micro_batches; ++i) actions.push_back({kForward, i, chunk});
  }
  for (uint32_t chunk = chunks; chunk-- > 0;) {
    for (uint64_t i = 0; i < micro_batches; ++i) actions.push_back({kBackward, i, chunk});
  }
  return actions;
}

}  // namespace smartinf::plan
