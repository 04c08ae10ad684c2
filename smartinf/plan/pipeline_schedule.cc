#include "smartinf/plan/pipeline_schedule.h"

#include <algorithm>

#include "smartinf/base/check.h"

namespace smartinf::plan {

uint64_t pipeline_in_flight(uint32_t stages, uint32_t stage, uint64_t micro_batches,
                            uint32_t ahead) {
  SI_CHECK(stage < stages, "a stage that is none of the pipeline's");
  return std::min(micro_batches, 1 + uint64_t{stages - 1 - stage} * (1 + ahead));
}

std::vector<PipelineAction> pipeline_actions(uint32_t stages, uint32_t stage,
                                             uint64_t micro_batches, uint32_t ahead) {
  using enum PipelineAction::Kind;
  const uint64_t in_flight = pipeline_in_flight(stages, stage, micro_batches, ahead);
  std::vector<PipelineAction> actions;
  uint64_t back = 0;
  for (uint64_t i = 0; i < micro_batches; ++i) {
    actions.push_back({kForward, i});
    if (i + 1 >= in_flight) actions.push_back({kBackward, back++});
  }
  while (back < micro_batches) actions.push_back({kBackward, back++});
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
