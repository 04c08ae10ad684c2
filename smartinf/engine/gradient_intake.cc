#include "smartinf/engine/gradient_intake.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;

GradientIntake::GradientIntake(const plan::ParameterSpace& space) : space_(space) {
  size_t cuts = 0;
  first_cut_.reserve(space.ranges().size());
  for (const plan::ParameterRange& range : space.ranges()) {
    first_cut_.push_back(cuts);
    cuts += base::divide_up(range.count, kGradientCutElements);
  }
  found_.resize(cuts);
}

void GradientIntake::begin() { std::fill(found_.begin(), found_.end(), Found{}); }

base::Result<std::vector<GradientIntake::Cut>> GradientIntake::take(uint64_t first,
                                                                    uint64_t count) {
  if (first > space_.count() || count > space_.count() - first) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("gradient of elements {} to {} given, but the model has {}", first,
                              first + count, space_.count()),
                  "This is a bug in the caller.");
  }
  std::vector<Cut> cuts;
  const uint64_t end = first + count;
  for (uint64_t at = first; at < end;) {
    const size_t r = space_.index_at(at);
    const plan::ParameterRange& range = space_.ranges()[r];
    const uint64_t range_end = range.first + range.count;
    const uint64_t within = at - range.first;
    const uint64_t cut_end = std::min(at + kGradientCutElements, range_end);
    if (within % kGradientCutElements != 0 || cut_end > end) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("the gradient of {} is cut at its element {}", range.name,
                                within % kGradientCutElements != 0 ? within : end - range.first),
                    fmt::format("Cuts fall on multiples of {} of a parameter, or at its end.",
                                kGradientCutElements));
    }
    const size_t index = cut_index(r, within);
    if (found_[index].given) {
      return Status(ErrorCode::kFailedPrecondition,
                    fmt::format("the gradient of {} from its element {} was given twice in a step",
                                range.name, within),
                    "Every part of a gradient is given once.");
    }
    cuts.push_back({index, at, cut_end - at});
    at = cut_end;
  }
  for (const Cut& cut : cuts) found_[cut.index].given = true;
  return cuts;
}

void GradientIntake::measure(const Cut& cut, const void* gradient, base::DataType type) {
  const kernels::KernelTable::Norm norm =
      kernels::kernels().partial_norm(gradient, type, cut.count);
  found_[cut.index].sum_of_squares = norm.sum_of_squares;
  found_[cut.index].finite = norm.finite;
}

base::Result<GradientSummary> GradientIntake::finish(double unscale) const {
  GradientSummary summary;
  double sum = 0;
  for (size_t r = 0; r < first_cut_.size(); ++r) {
    const plan::ParameterRange& range = space_.ranges()[r];
    const size_t end = r + 1 < first_cut_.size() ? first_cut_[r + 1] : found_.size();
    for (size_t i = first_cut_[r]; i < end; ++i) {
      if (!found_[i].given) {
        return Status(ErrorCode::kFailedPrecondition,
                      fmt::format("{} got no gradient from its element {} on", range.name,
                                  (i - first_cut_[r]) * kGradientCutElements),
                      "A parameter that took no part gets zeros.");
      }
      if (!found_[i].finite && summary.finite) {
        summary.finite = false;
        summary.first_bad = range.name;
      }
      sum += found_[i].sum_of_squares;
    }
  }
  summary.norm = std::sqrt(sum) * std::abs(unscale);
  return summary;
}

}  // namespace smartinf::engine
