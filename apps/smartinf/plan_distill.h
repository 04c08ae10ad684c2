// The subcommand of plan: smartinf plan distill.
#pragma once

#include "apps/smartinf/commands.h"

namespace smartinf::apps {

/// Adds it; its callback sets `run`.
void add_plan_distill(CLI::App& plan, Run& run);

}  // namespace smartinf::apps
