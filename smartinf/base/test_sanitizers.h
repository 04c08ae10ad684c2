// For tests: sanitizers take several times as long, so some of what differs in nothing but a
// combination of options is tested without them only; with them where SMARTINF_TEST_ALL is set, as
// scripts/nightly.sh does.
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

/// Under sanitizers: takes out of `kinds`, which have a name, those that are named.
template <typename Kinds>
void leave_out_where_sanitized(Kinds& kinds, std::span<const std::string_view> names) {
  if (!kSanitized || std::getenv("SMARTINF_TEST_ALL") != nullptr) return;
  std::erase_if(kinds, [&](const auto& kind) {
    return std::find(names.begin(), names.end(), kind.name) != names.end();
  });
}

}  // namespace smartinf::base
