// Time in tests. A busy machine can make anything late, so upper bounds on seconds are only checked
// where somebody asks for them: SMARTINF_TEST_TIMING=1, as scripts/nightly.sh does.
#pragma once

#include <cstdlib>

#include <gtest/gtest.h>

namespace smartinf::base {

inline bool timing_is_tested() { return std::getenv("SMARTINF_TEST_TIMING") != nullptr; }

/// Expects `seconds` to be at most `most_s`, on a machine that has nothing else to do.
inline void expect_in_time(double seconds, double most_s) {
  if (timing_is_tested()) {
    EXPECT_LE(seconds, most_s);
  }
}

}  // namespace smartinf::base
