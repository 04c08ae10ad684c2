// The subcommands. Each has a file of its own that adds its flags and help to the command line and
// leaves a function to run; main.cc knows no more of them than this list.
#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "smartinf/base/status.h"
#include "smartinf/config/recipe.h"

namespace smartinf::apps {

/// Exit codes, the same for every command.
inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;

/// The work of the chosen subcommand once the command line is parsed; returns an exit code.
using Run = std::function<int()>;

/// The dotted flags, taken out of the command line before it is parsed.
using Overrides = std::vector<config::Override>;

// Each adds its subcommand to `app`; its callback sets `run`.
void add_bench(CLI::App& app, Run& run);
void add_calibrate(CLI::App& app, Run& run);
void add_certificates(CLI::App& app, Run& run);
void add_distill(CLI::App& app, const Overrides& overrides, Run& run);
void add_doctor(CLI::App& app, Run& run);
void add_generate(CLI::App& app, Run& run);
void add_inspect(CLI::App& app, Run& run);
void add_metrics(CLI::App& app, Run& run);
void add_plan(CLI::App& app, Run& run);
void add_plot(CLI::App& app, Run& run);
void add_serve(CLI::App& app, Run& run);
void add_simulate(CLI::App& app, Run& run);
void add_train(CLI::App& app, const Overrides& overrides, Run& run);
void add_export(CLI::App& app, Run& run);
void add_fsck(CLI::App& app, Run& run);
void add_checkpoint(CLI::App& app, Run& run);
void add_restore(CLI::App& app, Run& run);
void add_reshard(CLI::App& app, Run& run);
void add_gc(CLI::App& app, Run& run);

inline constexpr char kTrainSummary[] = "Train a model; resume the run when it is run again";
inline constexpr char kDistillSummary[] =
    "Train a smaller model, layer by layer, to do what a model does; resume when it is run again";
inline constexpr char kGenerateSummary[] = "Continue texts with the model of a run or a folder";

/// Goes on as the process that is linked with torch where `command` needs it; `arguments` are
/// main's. Nothing where this process is the one to run it; an exit code where it cannot start.
std::optional<int> run_with_torch(std::string_view command, char** arguments);

// Subcommands of bench.
void add_bench_attend(CLI::App& bench, Run& run);
void add_bench_rows(CLI::App& bench, Run& run);
void add_bench_kernels(CLI::App& bench, Run& run);
void add_bench_step(CLI::App& bench, Run& run);
void add_bench_overlap(CLI::App& bench, Run& run);

/// The subcommand of simulate.
void add_simulate_memory(CLI::App& simulate, Run& run);

/// Prints a failure to standard error and returns the exit code for it: kExitInterrupted when the
/// user cancelled, else `code`.
int report(const base::Status& status, int code = kExitFailed);

}  // namespace smartinf::apps
