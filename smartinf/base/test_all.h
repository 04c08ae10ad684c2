// For tests: cases that differ from others in a combination of options only, and repetitions of
// what is random, run only where SMARTINF_TEST_ALL is set, as scripts/nightly.sh sets it;
// CONTRIBUTING.md has a table of them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <span>
#include <string_view>

namespace smartinf::base {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline bool test_all() { return std::getenv("SMARTINF_TEST_ALL") != nullptr; }

/// Unless all is tested: takes out of `kinds`, which have a name, those that are named.
template <typename Kinds>
void leave_for_the_night(Kinds& kinds, std::span<const std::string_view> names) {
  if (test_all()) return;
  std::erase_if(kinds, [&](const auto& kind) {
    return std::find(names.begin(), names.end(), kind.name) != names.end();
  });
}

}  // namespace smartinf::base
