// --state-format and --master of commands that make or move a state.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include "smartinf/base/state_format.h"

namespace smartinf::apps {

struct FormatFlags {
  std::string moments;
  std::string master;

  /// With what was not given as `usual` has it.
  base::StateFormat format(base::StateFormat usual = {}) const {
    if (!moments.empty()) usual.moments = *base::enum_from_name<base::MomentFormat>(moments);
    if (!master.empty()) usual.master = *base::enum_from_name<base::MasterFormat>(master);
    return usual;
  }
};

inline void add_format_flags(CLI::App& command, FormatFlags& flags, const std::string& usual) {
  command
      .add_option("--state-format", flags.moments,
                  "Format of momentum and variance [" + usual + "]")
      ->check(CLI::IsMember(base::enum_name_list<base::MomentFormat>()));
  command.add_option("--master", flags.master, "Format of the master weights [" + usual + "]")
      ->check(CLI::IsMember(base::enum_name_list<base::MasterFormat>()));
}

}  // namespace smartinf::apps
