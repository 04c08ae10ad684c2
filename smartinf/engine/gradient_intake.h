// What is found out about a step's gradient while it comes in: which parts are there, its norm, and
// the first parameter that is not finite. Holds no gradients; those go straight to the devices.
//
// The norm is a sum over fixed cuts of every range, added up in the order of the space. It is the
// same whatever the order and size of the pieces, the number of devices or the size of subgroups.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::engine {

/// Pieces of a range's gradient start and end on multiples of this within the range (or at its
/// end).
inline constexpr uint64_t kGradientCutElements = uint64_t{1} << 20;

/// Found while gradients came in.
struct GradientSummary {
  double norm = 0;  // global L2 norm, after unscaling
  bool finite = true;
  std::string first_bad;  // name of the first parameter with an infinity or NaN
};

class GradientIntake {
 public:
  struct Cut {
    size_t index = 0;    // among all cuts of the space
    uint64_t first = 0;  // element in the space
    uint64_t count = 0;
  };

  /// `space` outlives the intake.
  explicit GradientIntake(const plan::ParameterSpace& space);

  /// Forgets the step before.
  void begin();

  /// The cuts of a piece, into a list that is reused. Marks them as given.
  /// Errors: kInvalidArgument outside the space or cut elsewhere, kFailedPrecondition when a part
  /// was given before. Then nothing is marked.
  base::Result<std::vector<Cut>> take(uint64_t first, uint64_t count);

  /// Measures one cut's values. Threads: safe for different cuts.
  void measure(const Cut& cut, const void* gradient, base::DataType type);

  /// Errors: kFailedPrecondition when a range is incomplete (named).
  base::Result<GradientSummary> finish(double unscale) const;

 private:
  struct Found {
    double sum_of_squares = 0;
    bool given = false;
    bool finite = true;
  };
  size_t cut_index(size_t range, uint64_t within) const {
    return first_cut_[range] + within / kGradientCutElements;
  }

  const plan::ParameterSpace& space_;
  std::vector<size_t> first_cut_;  // of every range
  std::vector<Found> found_;       // of every cut
};

}  // namespace smartinf::engine
