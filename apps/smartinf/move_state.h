// Moving a state, for `smartinf restore` and `smartinf reshard`: the state of one place is brought
// onto other devices.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "smartinf/serve/options.h"

#include "apps/smartinf/format_flags.h"

namespace smartinf::apps {

struct MoveFlags {
  std::vector<std::string> from;
  std::vector<std::string> to;
  FormatFlags format;
  uint64_t subgroup_elements = 0;  // 0: as they are
  std::string durability = "step";
  std::string memory_budget = "256MiB";
  uint32_t stages = 0;   // of a pipeline, each with devices of its own; 0: any have all
  std::string split;     // layers of each, as ranks.split
  bool replace = false;  // states on the targets are deleted, once `from` was found whole
  bool json = false;
  serve::RemoteOptions remote;
};

/// Adds the flags that both have.
void add_move_flags(CLI::App& command, MoveFlags& flags);

/// Returns an exit code.
int move_state(const MoveFlags& flags);

}  // namespace smartinf::apps
