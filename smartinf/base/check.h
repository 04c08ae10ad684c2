// Checks for bugs. They stay in release builds: wrong numbers are worse than a stopped program.
#pragma once

#include <string_view>

namespace smartinf::base {

/// Prints where and what to standard error and aborts. For broken invariants only, never for input.
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               std::string_view message);

}  // namespace smartinf::base

#define SI_CHECK(condition, message)                                             \
  (static_cast<bool>(condition)                                                  \
       ? static_cast<void>(0)                                                    \
       : ::smartinf::base::check_failed(__FILE__, __LINE__, #condition, (message)))
