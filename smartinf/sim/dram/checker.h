// Whether a list of commands keeps every constraint of a memory. Written from the rules between
// pairs of commands, apart from the scheduler, which computes earliest cycles.
#pragma once

#include <span>

#include "smartinf/sim/dram/memory.h"

namespace smartinf::sim::dram {

/// commands: of one channel from its first on, in any order.
/// Errors: kInvalidArgument with the constraint, both commands, and the cycles between them.
base::Status check_commands(const Config& config, std::span<const IssuedCommand> commands);

}  // namespace smartinf::sim::dram
