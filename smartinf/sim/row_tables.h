// Steps of a table on devices of which each touches few rows, on the virtual clock: what is read,
// written and sent is counted by plan/row_schedule.h and plan/row_steps.h, row by row.
#pragma once

#include <cstdint>
#include <string>

#include "smartinf/base/status.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/row_rules.h"
#include "smartinf/sim/machine.h"

namespace smartinf::sim {

/// A table, and what steps look up in it.
struct RowTable {
  uint64_t rows = 0;
  uint32_t dim = 0;
  kernels::RowRule rule = kernels::RowRule::kSparseAdam;
  uint32_t value_bytes = 2;                  // of weights and gradients on the link
  uint64_t memory_bytes = 256 * base::kMiB;  // of all devices, as engine::UpdaterOptions
  uint64_t log_bytes = 0;                    // of all devices; 0: chosen
  uint64_t ids = 0;                          // of a step
  double zipf = 0;                           // exponent of the law of the ids; 0: all rows alike
  bool distinct = false;                     // ids of a step differ
};

struct RowSteps {
  uint32_t warm_up = 0;
  uint32_t steps = 0;   // of which the means are taken; 0: some, once the log is merged
  double beside_s = 0;  // between a gather and its update, in which merges cost nothing
};

/// Means of the steps.
struct RowTimes {
  double step_s = 0;
  double gather_s = 0;  // until the rows are there
  double update_s = 0;  // from their gradients to the commit, with merges for its room
  double merge_s = 0;   // merging, of one device, wherever it falls
  double rows = 0;      // different ones
  double cached = 0;    // share of them that is found in the cache
  // Of all devices.
  double read_bytes = 0;
  double written_bytes = 0;
  double link_up_bytes = 0;
  double link_down_bytes = 0;
  double device_written_bytes = 0;  // of the device that writes most
  uint64_t device_bytes = 0;        // room on the device that has most rows
  uint64_t dense_bytes = 0;         // read and written by a dense update of all rows in a step
  std::string bound_by;             // "drives", "rows' threads", "host link", "host"
  uint32_t steps = 0;               // simulated, warm-up included
};

/// Errors: kInvalidArgument for a table or ids that cannot be; kOutOfMemory where `memory_bytes`
/// are less than what rows' places take, with what would do.
base::Result<RowTimes> simulate_rows(const RowTable& table, const Machine& machine,
                                     const RowSteps& steps);

}  // namespace smartinf::sim
