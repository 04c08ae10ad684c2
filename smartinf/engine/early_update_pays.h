// When overlap = "auto" begins an update beside backward: one rule for the trainer and for Python.
// The choice changes the time of a step, never a bit.
#pragma once

namespace smartinf::engine {

/// Norms of neighbouring steps are alike: this far below the limit the next one is likely to be
/// below it, too.
inline constexpr double kLikelyNorm = 0.8;
/// Share of a late step that may be waited for before an early update is tried.
inline constexpr double kExposedShareMax = 0.05;

/// Whether the guess that nothing is clipped is likely to be right, and there is something to gain.
/// norm_before: of the last step's gradient; 0: there was none. norm_max: what is clipped; 0:
/// nothing. late_exposed: share of the last late step that was waited for. last: nothing is
/// computed behind the step.
constexpr bool early_update_pays(double norm_before, double norm_max, double late_exposed,
                                 bool last) {
  const bool right_guess =
      norm_max == 0 || (norm_before > 0 && norm_before < kLikelyNorm * norm_max);
  return right_guess && (last || late_exposed > kExposedShareMax);
}

}  // namespace smartinf::engine
