// What `smartinf plan` and `smartinf simulate` say of a cluster (--cluster).
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "smartinf/sim/cluster_plan.h"

#include "apps/smartinf/sim_flags.h"

namespace smartinf::apps {

struct ClusterOutput {
  std::string html;    // file; empty: none
  std::string recipe;  // likewise
  std::string data;    // of the recipe
  std::string trace;   // of the best option's step
  bool json = false;
};

/// Plans, prints the plan, and writes what is asked for. as_they_run: all boxes, in their order.
/// Returns an exit code.
int run_cluster(const SimFlags& flags, uint32_t value_bytes, bool as_they_run,
                const ClusterOutput& output);

nlohmann::ordered_json to_json(const sim::ClusterPlan& plan);

/// A page with a plan where it has its place for one.
std::string page_with(std::string page, const nlohmann::ordered_json& plan);

}  // namespace smartinf::apps
