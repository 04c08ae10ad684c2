#include "apps/smartinf/plan_table.h"

#include <algorithm>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/sim/planner.h"

namespace smartinf::apps {

base::Result<TablePlan> plan_table(const SimQuestion& question, const sim::StepOptions& options,
                                   const sim::StepTimes& step) {
  TablePlan plan;
  plan.table = *question.table;
  const uint64_t tokens = sim::step_tokens(question.model, question.machine, options);
  if (plan.table.ids > (uint64_t{1} << 30) / tokens) {
    return base::Status(
        base::ErrorCode::kInvalidArgument,
        fmt::format("{} tokens a step look up {} rows each", tokens, plan.table.ids),
        "Plan steps that look up 2^30 rows at most (--batch, --table-ids).");
  }
  plan.table.ids *= tokens;
  plan.table.value_bytes = options.value_bytes;
  // Merging goes on while the model computes.
  sim::RowSteps steps;
  steps.beside_s = step.forward_s + step.backward_s;
  SI_ASSIGN_OR_RETURN(plan.times, sim::simulate_rows(plan.table, question.machine, steps));
  plan.step_s = step.total_s + plan.times.step_s;
  const double dense_written =
      static_cast<double>(step.bytes.drive_written) / question.machine.device_count();
  for (const sim::DeviceGroup& device : question.machine.devices) {
    if (device.endurance_bytes == 0) continue;
    const double written =
        device.write_amplification * (plan.times.device_written_bytes + dense_written);
    const double days = static_cast<double>(device.endurance_bytes) / written * plan.step_s / 86400;
    plan.drive_life_days = plan.drive_life_days == 0 ? days : std::min(plan.drive_life_days, days);
  }
  return plan;
}

nlohmann::ordered_json to_json(const TablePlan& plan) {
  const sim::RowTimes& times = plan.times;
  return {{"rows", plan.table.rows},
          {"dim", plan.table.dim},
          {"rule", kernels::row_rule_name(plan.table.rule)},
          {"zipf", plan.table.zipf},
          {"ids", plan.table.ids},
          {"rows_of_step", times.rows},
          {"cached", times.cached},
          {"gather_s", times.gather_s},
          {"update_s", times.update_s},
          {"merge_s", times.merge_s},
          {"step_s", times.step_s},
          {"bound_by", times.bound_by},
          {"drive_read_bytes", times.read_bytes},
          {"drive_written_bytes", times.written_bytes},
          {"host_link_up_bytes", times.link_up_bytes},
          {"host_link_down_bytes", times.link_down_bytes},
          {"dense_bytes", times.dense_bytes},
          {"device_bytes", times.device_bytes},
          {"memory_bytes", plan.table.memory_bytes},
          {"total_s", plan.step_s},
          {"drive_life_days", plan.drive_life_days},
          {"steps_simulated", times.steps}};
}

void print_table(const TablePlan& plan, const sim::Machine& machine) {
  const sim::RowTimes& times = plan.times;
  const auto bytes = [](double value) { return base::format_bytes(static_cast<uint64_t>(value)); };
  fmt::print(
      "\na table of {} rows of {} by {}, on the devices; a step looks up {}, of {:.0f} different "
      "rows ({:.2g} %)\n",
      plan.table.rows, plan.table.dim, kernels::row_rule_name(plan.table.rule), plan.table.ids,
      times.rows, 100 * times.rows / static_cast<double>(plan.table.rows));
  fmt::print(
      "  time     {} more: {} until the rows are there ({:.0f} % of them were in memory), {} "
      "to update them; limited by {}\n",
      base::format_seconds(times.step_s), base::format_seconds(times.gather_s), 100 * times.cached,
      base::format_seconds(times.update_s), times.bound_by);
  fmt::print("           merging, beside the model, takes each device {} a step\n",
             base::format_seconds(times.merge_s));
  fmt::print("  bytes    {} read and {} written a step; a dense update of all rows moves {}\n",
             bytes(times.read_bytes), bytes(times.written_bytes),
             base::format_bytes(times.dense_bytes));
  fmt::print("  link     {} up, {} down\n", bytes(times.link_up_bytes),
             bytes(times.link_down_bytes));
  const uint64_t capacity = machine.devices.front().capacity_bytes;
  fmt::print("  room     {} on the drive that has most{}; {} of memory\n",
             base::format_bytes(times.device_bytes),
             capacity == 0 ? "" : ", of " + base::format_bytes(capacity),
             base::format_bytes(plan.table.memory_bytes));
  fmt::print("  step     {} with the model; the drives last {}\n",
             base::format_seconds(plan.step_s),
             plan.drive_life_days > 0 ? sim::drive_life_text(plan.drive_life_days)
                                      : "as long as device.endurance_bytes would say");
}

}  // namespace smartinf::apps
