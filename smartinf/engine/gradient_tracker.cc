#include "smartinf/engine/gradient_tracker.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/kernels/pairwise_sum.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;

GradientTracker::GradientTracker(const plan::ParameterSpace& space) : space_(space) {
  size_t pieces = 0;
  first_piece_.reserve(space.ranges().size());
  for (const plan::ParameterRange& range : space.ranges()) {
    first_piece_.push_back(pieces);
    pieces += base::divide_up(range.count, kGradientPieceElements);
  }
  found_.resize(pieces);
}

void GradientTracker::begin() {
  std::fill(found_.begin(), found_.end(), Found{});
  skipped_.clear();
  begun_ = false;
}

base::Result<std::vector<GradientTracker::Piece>> GradientTracker::take(uint64_t first,
                                                                        uint64_t count) {
  if (first > space_.count() || count > space_.count() - first) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("a gradient of elements {} to {} was given, but the model has {}",
                              first, first + count, space_.count()),
                  "This is a bug in the caller.");
  }
  std::vector<Piece> pieces;
  const uint64_t end = first + count;
  for (uint64_t at = first; at < end;) {
    const size_t r = space_.index_at(at);
    const plan::ParameterRange& range = space_.ranges()[r];
    const uint64_t range_end = range.first + range.count;
    const uint64_t within = at - range.first;
    const uint64_t to = std::min(end, range_end);
    if (within % kGradientCutElements != 0 ||
        (to != range_end && (to - range.first) % kGradientCutElements != 0)) {
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("a piece of the gradient of {} ends at its element {}", range.name,
                      within % kGradientCutElements != 0 ? within : to - range.first),
          fmt::format("A piece ends at a multiple of {} elements of a parameter, or at its end.",
                      kGradientCutElements));
    }
    for (; at < to; at = pieces.back().first + pieces.back().count) {
      const uint64_t from = at - range.first;
      const size_t index = first_piece_[r] + from / kGradientPieceElements;
      if (found_[index].given) {
        return Status(
            ErrorCode::kFailedPrecondition,
            fmt::format("the gradient of {} from its element {} was given twice in a step",
                        range.name, from),
            "Every part of a gradient is given once.");
      }
      pieces.push_back({index, at, std::min(kGradientPieceElements, to - at)});
    }
  }
  for (const Piece& piece : pieces) found_[piece.index].given = true;
  begun_ = true;
  return pieces;
}

Status GradientTracker::skip(uint64_t first, uint64_t count) {
  SI_RETURN_IF_ERROR(take(first, count).status());
  skipped_.push_back({first, count});
  return Status();
}

void GradientTracker::measure(const Piece& piece, const void* gradient, base::DataType type) {
  const kernels::KernelTable::Norm norm =
      kernels::kernels().partial_norm(gradient, type, piece.count);
  found_[piece.index].measured = {norm.sum_of_squares, norm.finite};
}

std::vector<GradientTracker::Piece> GradientTracker::all_pieces() const {
  std::vector<Piece> pieces;
  for (const plan::ParameterRange& range : space_.ranges()) {
    for (uint64_t done = 0; done < range.count; done += kGradientPieceElements) {
      pieces.push_back({pieces.size(), range.first + done,
                        std::min(kGradientPieceElements, range.count - done)});
    }
  }
  return pieces;
}

double GradientTracker::sum_of_squares(std::span<const Piece> pieces) const {
  double sum = 0;
  for (const Piece& piece : pieces) {
    if (!found_[piece.index].measured.finite) return std::numeric_limits<double>::infinity();
    sum += found_[piece.index].measured.sum_of_squares;
  }
  return sum;
}

base::Result<GradientSummary> GradientTracker::finish(double unscale) const {
  constexpr size_t kPiecesOfCut = kGradientCutElements / kGradientPieceElements;
  GradientSummary summary;
  std::vector<double> cuts;
  for (size_t r = 0; r < first_piece_.size(); ++r) {
    const plan::ParameterRange& range = space_.ranges()[r];
    const size_t end = r + 1 < first_piece_.size() ? first_piece_[r + 1] : found_.size();
    for (size_t cut = first_piece_[r]; cut < end; cut += kPiecesOfCut) {
      kernels::PairwiseSum of_cut;
      for (size_t i = cut; i < std::min(end, cut + kPiecesOfCut); ++i) {
        if (!found_[i].given) {
          return Status(ErrorCode::kFailedPrecondition,
                        fmt::format("the gradient of {} is missing from its element {} on",
                                    range.name, (i - first_piece_[r]) * kGradientPieceElements),
                        "Put zeros for a parameter that was not used.");
        }
        if (!found_[i].measured.finite && summary.finite) {
          summary.finite = false;
          summary.first_bad = range.name;
        }
        of_cut.add(found_[i].measured.sum_of_squares);
      }
      cuts.push_back(of_cut.total());
    }
  }
  if (summary.finite) std::ranges::sort(cuts);  // a NaN has no place in an order
  const double sum = std::accumulate(cuts.begin(), cuts.end(), 0.0);
  summary.norm = std::sqrt(sum) * std::abs(unscale);
  return summary;
}

}  // namespace smartinf::engine
