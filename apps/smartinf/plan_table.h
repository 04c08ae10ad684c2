// What a table of which a step touches few rows adds to a step of training (--table).
#pragma once

#include <nlohmann/json.hpp>

#include "smartinf/base/status.h"
#include "smartinf/sim/row_tables.h"
#include "smartinf/sim/step.h"

#include "apps/smartinf/sim_flags.h"

namespace smartinf::apps {

struct TablePlan {
  sim::RowTable table;  // its ids are those of a step
  sim::RowTimes times;
  double step_s = 0;           // of the model's other parameters and the table
  double drive_life_days = 0;  // of the drive that wears fastest, by both; 0: not known
};

/// question.table beside a step that takes so long. Errors: simulate_rows's.
base::Result<TablePlan> plan_table(const SimQuestion& question, const sim::StepOptions& options,
                                   const sim::StepTimes& step);

nlohmann::ordered_json to_json(const TablePlan& plan);
void print_table(const TablePlan& plan, const sim::Machine& machine);

}  // namespace smartinf::apps
