// How commands that read no recipe get at devices of other machines.
#pragma once

#include <CLI/CLI.hpp>

#include "smartinf/serve/options.h"

namespace smartinf::apps {

/// --remote-certificate and its like: a recipe's [remote]; from the environment where they are not
/// given.
void add_remote_flags(CLI::App& command, serve::RemoteOptions& remote);

}  // namespace smartinf::apps
