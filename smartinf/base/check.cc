#include "smartinf/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace smartinf::base {

void check_failed(const char* file, int line, const char* condition, std::string_view message) {
  std::fprintf(stderr,
               "smartinf: internal error: %.*s\n  %s:%d: %s\n"
               "This is a bug in smartinf, not in your input. Committed steps are not affected.\n",
               static_cast<int>(message.size()), message.data(), file, line, condition);
  std::abort();
}

}  // namespace smartinf::base
