#include <algorithm>
#include <cstring>

#include "smartinf/engine/gradient_path.h"
#include "smartinf/engine/gradient_sender.h"

namespace smartinf::engine {
namespace {

using base::Status;

class DensePath final : public GradientPath {
 public:
  explicit DensePath(const PathParts& parts)
      : GradientPath(parts),
        sender_(parts.set, parts.tracker, parts.team, parts.options.gradient_type, parts.watch) {}

  Status put(std::span<const GradientTracker::Piece> pieces, uint64_t first, const void* gradient,
             base::DataType type) override {
    return sender_.put(pieces, first, gradient, type, parts_.state.memory()).status;
  }

  /// Zeros for what was skipped, where the rest of its subgroup is updated.
  base::Result<double> finish(const UpdateOptions& options, base::StepNumber) override {
    const std::span<std::byte> zeros = parts_.state.memory();
    if (!parts_.tracker.skipped().empty()) std::memset(zeros.data(), 0, zeros.size());
    for (const GradientTracker::Span& skipped : parts_.tracker.skipped()) {
      const uint64_t end = skipped.first + skipped.count;
      const auto& subgroups = parts_.set.subgroups;
      for (size_t i = parts_.set.subgroup_at(skipped.first);
           i < subgroups.size() && subgroups[i].first < end; ++i) {
        if (is_skipped(parts_.space, subgroups[i], options)) continue;
        const uint64_t first = std::max(skipped.first, subgroups[i].first);
        const uint64_t count = std::min(end, subgroups[i].first + subgroups[i].count) - first;
        SI_RETURN_IF_ERROR(sender_.put_zeros(first, count, zeros).status);
      }
    }
    return options.gradient_scale;
  }

 private:
  GradientSender sender_;
};

}  // namespace

std::unique_ptr<GradientPath> make_dense_path(const PathParts& parts) {
  return std::make_unique<DensePath>(parts);
}

}  // namespace smartinf::engine
