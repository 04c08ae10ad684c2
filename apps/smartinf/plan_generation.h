// `smartinf plan --generate`: what answering prompts needs of a machine.
#pragma once

#include "apps/smartinf/sim_flags.h"

namespace smartinf::apps {

/// flags have kGenerateFlag. Returns an exit code.
int run_generation_plan(const SimFlags& flags, bool json);

}  // namespace smartinf::apps
