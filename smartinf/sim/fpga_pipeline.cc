#include "smartinf/sim/fpga_pipeline.h"

#include <algorithm>

#include "smartinf/base/state_format.h"

namespace smartinf::sim {
namespace {

constexpr double kLanes = 16;
constexpr double kWordBytes = 64;
/// Between blocks: a checksum's pipeline is empty before the next block's keys are made. About the
/// depth of its products and sums.
constexpr double kBlockCycles = 40;

}  // namespace

double PipelineCycles::slowest() const { return std::max({update, scatter, memory}); }

PipelineCycles pipeline_cycles(const FpgaPipeline& pipeline, const PipelineElement& element) {
  PipelineCycles cycles;
  cycles.update =
      pipeline.word_cycles / kLanes + kBlockCycles / static_cast<double>(base::kBlockElements);
  // A cycle for every value and one for every word.
  if (element.values > 0) cycles.scatter = 1 / kLanes + element.values;
  const double bytes =
      8.0 * element.planes + element.gradient_bytes + element.weights_bytes;  // planes: in and out
  const double bank_bytes = std::min(
      pipeline.bank_bytes_per_s * pipeline.bank_efficiency / pipeline.clock_hz, kWordBytes);
  cycles.memory = bytes / (bank_bytes * pipeline.banks);
  return cycles;
}

double pipeline_seconds(const FpgaPipeline& pipeline, const PipelineElement& element) {
  return pipeline_cycles(pipeline, element).slowest() / pipeline.clock_hz;
}

bool pipeline_has(kernels::UpdateRule rule) { return rule != kernels::UpdateRule::kLion; }

}  // namespace smartinf::sim
