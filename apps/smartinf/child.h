// Output of another program, for what only other programs can tell.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace smartinf::apps {

/// Runs words[0] (searched in PATH, no shell) and returns what it wrote to standard output, at most
/// 1 MiB. Nothing when it is not installed, fails to end within `wait` (it is killed then) or when
/// it wrote nothing; its exit status is not looked at, because smartctl's is a bit field.
std::optional<std::string> child_output(const std::vector<std::string>& words,
                                        std::chrono::milliseconds wait);

}  // namespace smartinf::apps
