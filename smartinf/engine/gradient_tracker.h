// Facts about a step's gradient, found while it comes in: which parts are there, its norm, and the
// first parameter that is not finite. Holds no gradients; those go straight to the devices.
//
// The norm is a sum over fixed cuts of every range, added up from the smallest to the largest. It
// is the same whatever the order of ranges in the space, the order and size of what is given at
// once, the number of threads and of devices, or the size of subgroups.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::engine {

using plan::kGradientCutElements;
/// Elements that one thread measures and hands over at once, counted from the beginning of a cut:
/// small enough to stay in a core's cache in between, and a whole part of the tree by which a cut's
/// squares are added up.
inline constexpr uint64_t kGradientPieceElements = uint64_t{1} << 17;
static_assert(kGradientCutElements % kGradientPieceElements == 0);

/// Found while gradients came in.
struct GradientSummary {
  double norm = 0;  // global L2 norm, after unscaling
  bool finite = true;
  std::string first_bad;  // name of the first parameter with an infinity or NaN
};

class GradientTracker {
 public:
  struct Piece {
    size_t index = 0;    // among all pieces of the space
    uint64_t first = 0;  // element in the space
    uint64_t count = 0;
    bool measured = true;  // false: a part of it, whose norm another rank measures
  };
  /// Result of measure().
  struct Measured {
    double sum_of_squares = 0;
    bool finite = true;
  };

  struct Span {
    uint64_t first = 0;
    uint64_t count = 0;
  };

  /// `space` outlives the tracker.
  explicit GradientTracker(const plan::ParameterSpace& space);

  /// Forgets the step before.
  void begin();

  /// The pieces of a span of the gradient, in order. Marks them as given.
  /// Errors: kInvalidArgument outside the space or cut elsewhere, kFailedPrecondition when a part
  /// was given before. Then nothing is marked.
  base::Result<std::vector<Piece>> take(uint64_t first, uint64_t count);
  /// A span that has no gradient in this step. Errors: as take().
  base::Status skip(uint64_t first, uint64_t count);
  std::span<const Span> skipped() const { return skipped_; }
  /// Whether anything was given or skipped in this step.
  bool begun() const { return begun_; }

  /// Measures one piece's values. Threads: safe for different pieces.
  void measure(const Piece& piece, const void* gradient, base::DataType type);

  const Measured& measured(size_t piece) const { return found_[piece].measured; }
  /// As another rank has measured it.
  void set_measured(size_t piece, const Measured& measured) { found_[piece].measured = measured; }
  /// Pieces of the whole space, in order, whatever was given.
  std::vector<Piece> all_pieces() const;

  /// Sum of squares of measured pieces; infinite where a value is not finite.
  double sum_of_squares(std::span<const Piece> pieces) const;

  /// Errors: kFailedPrecondition when a range is incomplete (named).
  base::Result<GradientSummary> finish(double unscale) const;

 private:
  struct Found {
    Measured measured;
    bool given = false;
  };
  const plan::ParameterSpace& space_;
  std::vector<size_t> first_piece_;  // of every range
  std::vector<Found> found_;         // of every piece
  // State of this step:
  std::vector<Span> skipped_;
  bool begun_ = false;
};

}  // namespace smartinf::engine
