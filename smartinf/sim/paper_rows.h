// What the Smart-Infinity paper measured, as far as it was read off for this project, and how far
// the simulator is from it. The constants of machines/smartssd-*.toml are fitted to these rows.
// Source: Jang et al., HPCA 2024 (arXiv 2403.06664); bar heights good to about 0.05 s.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// One measured step. Times that the paper does not give are 0.
struct PaperRow {
  std::string_view group;  // "seconds", "scaling", "raid0" or "kinds"
  std::string_view model;
  uint32_t devices = 0;
  Method method = Method::kBaseline;
  double forward_s = 0;
  double backward_s = 0;
  double update_s = 0;
  double total_s = 0;
  kernels::UpdateRule rule = kernels::UpdateRule::kAdamW;
};

/// "seconds": the table of seconds per iteration. "scaling": throughput against the number of
/// devices, GPT-2 4.0B, times the 53.7 s of the baseline with one device. "raid0": the baseline's
/// RAID0 speed-up, likewise. "kinds": another optimizer, another kind of model.
std::span<const PaperRow> paper_rows();

/// Shares of a step with one plain SSD, in percent.
struct PaperShares {
  std::string_view model;
  double forward, backward, update;
};
std::span<const PaperShares> paper_shares();

struct PaperComparison {
  PaperRow row;
  StepTimes simulated;
  double error = 0;  // (simulated - measured) / measured total time
};

/// Runs every row on `machine` (its GPU and rates; the row's devices and method).
base::Result<std::vector<PaperComparison>> compare_with_paper(const Machine& machine);

/// The machine with `devices` devices, all of the first kind it has.
Machine with_devices(Machine machine, uint32_t devices);

}  // namespace smartinf::sim
