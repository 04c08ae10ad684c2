#include "smartinf/engine/gradient_path.h"

#include <algorithm>
#include <thread>

namespace smartinf::engine {

base::Result<bool> GradientPath::start_commit_of_edit(const CompressionState&, bool,
                                                      base::StepNumber step, StepMetadata& next) {
  // A residual on the devices that nobody uses now stays that of the committed step.
  if (step > 0 && next.residual_step == step - 1) next.residual_step = step;
  return false;
}

uint32_t gradient_threads() { return std::clamp(std::thread::hardware_concurrency(), 1u, 8u); }

bool is_skipped(const plan::ParameterSpace& space, const plan::Subgroup& subgroup,
                const UpdateOptions& options) {
  const auto spans = space.spans(subgroup.first, subgroup.count);
  return std::all_of(spans.begin(), spans.end(),
                     [&](const plan::GroupSpan& span) { return options.groups[span.group].skip; });
}

base::Result<std::unique_ptr<GradientPath>> make_gradient_path(const PathParts& parts,
                                                               const StepMetadata& committed) {
  if (parts.options.compress.on()) return make_compressed_path(parts, committed);
  return make_dense_path(parts);
}

}  // namespace smartinf::engine
