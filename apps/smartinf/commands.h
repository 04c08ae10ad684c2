// The subcommands. Each has a file of its own that adds its flags and help to the command line and
// leaves a function to run; main.cc knows no more of them than this list.
#pragma once

#include <functional>

#include <CLI/CLI.hpp>

#include "smartinf/base/status.h"

namespace smartinf::apps {

/// Exit codes, the same for every command.
inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;

/// What the chosen subcommand does once the command line is parsed; returns an exit code.
using Run = std::function<int()>;

// Each adds its subcommand to `app` and sets `run` when it is the one chosen.
void add_bench_command(CLI::App& app, Run& run);

// Subcommands of bench.
void add_bench_kernels_command(CLI::App& bench, Run& run);

}  // namespace smartinf::apps
