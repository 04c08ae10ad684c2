// Which of several processes this one is: what torchrun, srun, mpirun or a script of one's own has
// put into the environment.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "smartinf/base/status.h"

namespace smartinf::train {

struct RankEnvironment {
  uint32_t rank = 0;
  uint32_t world = 1;
  std::string host;  // of the store through which ranks find each other
  uint16_t port = 0;
  bool store_runs = false;  // torchrun's agent serves it; else rank 0 does
  std::string start;        // tells starts apart that meet in the same store
};

/// The value of a variable; null where it is not set.
using GetVariable = std::function<const char*(const char* name)>;

/// Nothing where this is the only process. Errors: kInvalidArgument for variables that do not fit
/// together, with the one to set.
base::Result<std::optional<RankEnvironment>> rank_environment(const GetVariable& get);
/// Of this process's own environment.
base::Result<std::optional<RankEnvironment>> rank_environment();

}  // namespace smartinf::train
