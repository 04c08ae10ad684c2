// The flags that `simulate` and `plan` share: which model, on which machine, in which way. All are
// texts until they are applied, so that --sweep can set any of them.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "smartinf/base/status.h"
#include "smartinf/sim/cluster_plan.h"
#include "smartinf/sim/generation.h"
#include "smartinf/sim/row_tables.h"
#include "smartinf/sim/step.h"

namespace smartinf::apps {

/// One question to the simulator, ready to run.
struct SimQuestion {
  sim::ModelShape model;
  sim::Machine machine;
  sim::StepOptions options;           // of training
  sim::GenerationOptions generation;  // with --generate
  std::optional<sim::Cluster> cluster;  // in place of the machine
  sim::ClusterRequest cluster_request;  // with it
  std::optional<sim::RowTable> table;  // of training, beside the model; its ids are of one token
};

/// Values by flag name without dashes: {"model", "gpt2-4.0B"}. What is not set is at its default.
using SimFlags = std::map<std::string, std::string, std::less<>>;

/// With it a question is about generation, of this model.
inline constexpr const char* kGenerateFlag = "generate";

/// With it a question is about a cluster, in place of a machine.
inline constexpr const char* kClusterFlag = "cluster";

/// Adds the flags to a command; values land in `flags` when it is parsed.
void add_sim_flags(CLI::App& command, SimFlags& flags);
/// Names that may be swept.
std::vector<std::string_view> sim_flag_names();

/// Errors: kInvalidArgument or kNotFound naming the flag, and the nearest name where there is one.
base::Result<SimQuestion> apply_sim_flags(const SimFlags& flags);

/// What memory is for, with the bytes of each part: "weights 15.0 GiB, buffers 257 MiB".
std::string parts_text(const std::vector<plan::MemoryPart>& parts);

}  // namespace smartinf::apps
