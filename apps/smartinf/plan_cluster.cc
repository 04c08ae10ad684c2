#include "apps/smartinf/plan_cluster.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include <fmt/format.h>

#include "smartinf/base/file.h"
#include "smartinf/base/units.h"
#include "smartinf/sim/planner.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/python_script.h"
#include "apps/smartinf/trace_file.h"

namespace smartinf::apps {
namespace {

using nlohmann::ordered_json;

/// Of each box of an option the rank that takes most memory.
std::vector<const sim::RankNeed*> fullest_of_boxes(const sim::ClusterOption& option) {
  std::vector<const sim::RankNeed*> fullest;
  for (const uint32_t box : option.order) {
    const sim::RankNeed* most = nullptr;
    for (const sim::RankNeed& rank : option.ranks) {
      if (rank.box != box) continue;
      if (most == nullptr || rank.need.host_bytes + rank.need.gpu_bytes >
                                 most->need.host_bytes + most->need.gpu_bytes) {
        most = &rank;
      }
    }
    fullest.push_back(most);
  }
  return fullest;
}

std::string of_limit(uint64_t bytes, uint64_t limit) {
  return limit == 0 ? base::format_bytes(bytes)
                    : fmt::format("{} of {}", base::format_bytes(bytes), base::format_bytes(limit));
}

std::string box_text(const sim::ClusterPlan& plan, const sim::ClusterOption& option,
                     const sim::RankNeed& rank) {
  const sim::Box& box = plan.cluster.boxes[rank.box];
  std::string text = fmt::format("{}: ", box.name);
  std::set<uint32_t> stages;
  for (const sim::RankNeed& one : option.ranks) {
    if (one.box == rank.box) stages.insert(one.stage);
  }
  if (option.pipeline > 1) {
    text += fmt::format("stage{} {}; ", stages.size() > 1 ? "s" : "", fmt::join(stages, ", "));
  }
  if (rank.gpu_limit_bytes > 0) {
    text += fmt::format("GPU {}, ", of_limit(rank.need.gpu_bytes, rank.gpu_limit_bytes));
  }
  return text + fmt::format("host {}{}, each drive {}; drives last {}",
                            of_limit(rank.need.host_bytes, rank.host_limit_bytes),
                            box.ranks > 1 ? " a rank" : "",
                            base::format_bytes(rank.need.drive_bytes),
                            sim::drive_life_text(rank.drive_life_days));
}

std::string network_text(const sim::ClusterOption& option) {
  std::string text;
  if (option.boundary_bytes > 0) {
    const std::string whole = base::format_bytes(option.boundary_bytes);
    text = option.back_bytes == option.boundary_bytes
               ? fmt::format("a step sends {} over each boundary, each way", whole)
               : fmt::format("a step sends {} over each boundary, and gradients of {} back", whole,
                             base::format_bytes(option.back_bytes));
  }
  if (option.exchange_bytes > 0) {
    text += fmt::format("{}each rank sends {} of gradients and weights to its replicas",
                        text.empty() ? "" : "; ", base::format_bytes(option.exchange_bytes));
  }
  return text;
}

void print_plan(const sim::ClusterPlan& plan, const ClusterOutput& output) {
  const sim::Cluster& cluster = plan.cluster;
  fmt::print("{}: {} on {} ({} box{}, {} rank{})\n", plan.model.name,
             sim::parameters_text(plan.model), cluster.name, cluster.boxes.size(),
             cluster.boxes.size() == 1 ? "" : "es", cluster.ranks(),
             cluster.ranks() == 1 ? "" : "s");
  fmt::print("{} ways; {} of those that could be best do not fit, {} were simulated\n",
             plan.considered, plan.without_memory, plan.simulated);
  if (plan.best.empty()) {
    fmt::print("It does not fit. Nearest: {}\n", plan.lacks);
    return;
  }
  for (size_t i = 0; i < plan.best.size(); ++i) {
    const sim::ClusterOption& option = plan.best[i];
    fmt::print("\n{}  {}\n", i + 1, sim::option_text(plan, option));
    fmt::print("     a step {}, {:.0f} tokens/s{}; bound by {}\n",
               base::format_seconds(option.step_s), option.tokens_per_s,
               option.cost_per_mtoken > 0
                   ? fmt::format(", {:.2f} a million tokens", option.cost_per_mtoken)
                   : "",
               option.bound_by);
    for (const sim::RankNeed* rank : fullest_of_boxes(option)) {
      fmt::print("     {}\n", box_text(plan, option, *rank));
    }
    if (const std::string text = network_text(option); !text.empty()) fmt::print("     {}\n", text);
  }
  const sim::ClusterOption& best = plan.best.front();
  fmt::print("\n");
  if (const std::string text = sim::order_text(plan, best); !text.empty()) fmt::print("{}\n", text);
  const std::string recipe = output.recipe.empty() ? "RECIPE" : output.recipe;
  const std::vector<std::string> lines = sim::cluster_launch(plan, best, recipe);
  fmt::print("start it with{}\n", output.recipe.empty() ? " (--recipe writes RECIPE)" : "");
  for (size_t i = 0; i < lines.size(); ++i) {
    fmt::print("  on {}: {}\n", cluster.boxes[best.order[i]].name, lines[i]);
  }
}

std::string to_html(const sim::ClusterPlan& plan) {
  ordered_json all = apps::to_json(plan);
  for (const sim::Span& span : plan.best.empty() ? std::vector<sim::Span>() : plan.best[0].spans) {
    all["spans"].push_back({span.lane, span.name, span.start_s, span.end_s});
  }
  return page_with(std::string(cluster_page()), all);
}

/// Prints the plan and writes what is asked for. Returns an exit code.
int show_cluster_plan(const sim::ClusterPlan& plan, const ClusterOutput& output) {
  if (output.json) {
    fmt::print("{}\n", apps::to_json(plan).dump(2));
  } else {
    print_plan(plan, output);
  }
  std::fflush(stdout);
  if (!output.html.empty()) {
    const base::Status written =
        base::write_text_file(output.html, to_html(plan), "cannot write the report");
    if (!written.ok()) return report(written);
  }
  if (plan.best.empty()) return kExitFailed;
  const sim::ClusterOption& best = plan.best.front();
  if (!output.trace.empty()) {
    const base::Status written = write_spans(output.trace, best.spans);
    if (!written.ok()) return report(written);
  }
  if (!output.recipe.empty()) {
    const auto recipe = sim::cluster_recipe(plan, best, output.data);
    if (!recipe.ok()) return report(recipe.status());
    const base::Status written =
        base::write_text_file(output.recipe, *recipe, "cannot write the recipe");
    if (!written.ok()) return report(written);
  }
  return kExitDone;
}

}  // namespace

ordered_json to_json(const sim::ClusterPlan& plan) {
  ordered_json options = ordered_json::array();
  for (const sim::ClusterOption& option : plan.best) {
    ordered_json boxes = ordered_json::array();
    for (const sim::RankNeed* rank : fullest_of_boxes(option)) {
      boxes.push_back({{"box", plan.cluster.boxes[rank->box].name},
                       {"stage", rank->stage},
                       {"text", box_text(plan, option, *rank)},
                       {"gpu_bytes", rank->need.gpu_bytes},
                       {"gpu_limit_bytes", rank->gpu_limit_bytes},
                       {"host_bytes", rank->need.host_bytes},
                       {"host_limit_bytes", rank->host_limit_bytes},
                       {"device_bytes", rank->need.drive_bytes},
                       {"drive_life_days", rank->drive_life_days}});
    }
    options.push_back({{"option", sim::option_text(plan, option)},
                       {"pipeline", option.pipeline},
                       {"replicas", option.replicas},
                       {"micro_batch", option.micro_batch},
                       {"accumulation", option.accumulation},
                       {"ahead", option.ahead},
                       {"chunks", option.chunks},
                       {"recompute", option.recompute},
                       {"compression", option.compression},
                       {"streams", option.ranks.front().need.plan.streams},
                       {"total_s", option.step_s},
                       {"least_s", option.least_s},
                       {"tokens_per_s", option.tokens_per_s},
                       {"bound_by", option.bound_by},
                       {"boundary_bytes", option.boundary_bytes},
                       {"back_bytes", option.back_bytes},
                       {"exchange_bytes", option.exchange_bytes},
                       {"network", network_text(option)},
                       {"cost_per_mtoken", option.cost_per_mtoken},
                       {"boxes", boxes},
                       {"launch", sim::cluster_launch(plan, option, "RECIPE")}});
  }
  return {{"model", plan.model.name},
          {"parameters", plan.model.parameters()},
          {"cluster", plan.cluster.name},
          {"ranks", plan.cluster.ranks()},
          {"considered", plan.considered},
          {"without_memory", plan.without_memory},
          {"simulated", plan.simulated},
          {"fits", !plan.best.empty()},
          {"lacks", plan.lacks},
          {"order", plan.best.empty() ? "" : sim::order_text(plan, plan.best.front())},
          {"options", options}};
}

int run_cluster(const SimFlags& flags, uint32_t value_bytes, bool as_they_run,
                const ClusterOutput& output) {
  auto question = apply_sim_flags(flags);
  if (!question.ok()) return report(question.status(), kExitUsage);
  sim::ClusterRequest request = question->cluster_request;
  request.options.value_bytes = value_bytes;
  request.all_boxes = as_they_run;
  const auto plan = sim::plan_cluster(question->model, *question->cluster, request);
  if (!plan.ok()) return report(plan.status(), kExitUsage);
  return show_cluster_plan(*plan, output);
}

std::string page_with(std::string page, const ordered_json& plan) {
  constexpr std::string_view kMark = "@PLAN@";
  std::string json = plan.dump(-1, ' ', true);
  for (size_t at = 0; (at = json.find('<', at)) != std::string::npos;)
    json.replace(at, 1, "\\u003c");
  return page.replace(page.find(kMark), kMark.size(), json);
}

}  // namespace smartinf::apps
