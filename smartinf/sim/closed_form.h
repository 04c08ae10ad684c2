// The formulas that people put on a slide, with their sources: what they say, and how far the
// event-driven run is from them.
#pragma once

#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// Bytes over the host link in one step, in f32 gradients and weights as the paper moves them.
/// M = 2 bytes x parameters: baseline 8M up (6M state, 2M gradients) and 8M down; SmartUpdate 2M up
/// (weights) and 2M down (gradients); with SmartComp ratio x 2M down. Optimizers with one moment
/// keep 4M of state instead of 6M.
/// Source: Smart-Infinity, HPCA 2024, Table I.
struct LinkBytes {
  double up = 0;
  double down = 0;
};
LinkBytes table_one(Method method, kernels::UpdateRule rule, double parameters, double ratio);

/// T_opt,n = max(T_opt / n, T_swap / min(n, B_host / B_device)), T_total,n = T_opt,n + T_fwd +
/// T_bwd. T_opt: one device reads and writes a step's state and gradients. T_swap: what crosses the
/// host link in the update, over one device's own link. Everything overlaps perfectly, nothing is
/// copied, and drives lose nothing by mixing. Source: the scalability model of a course project
/// that repeated the paper on one SmartSSD.
struct ClosedForm {
  double optimizer_one_s = 0;  // T_opt
  double swap_one_s = 0;       // T_swap
  double links_worth = 0;      // B_host / B_device: devices that fill the host link
  double forward_s = 0;
  double backward_s = 0;
  double update_s = 0;  // T_opt,n
  double total_s = 0;
  bool link_bound = false;  // the second term is the larger
};
base::Result<ClosedForm> closed_form(const ModelShape& model, const Machine& machine,
                                     const StepOptions& options);

/// Why the event-driven total differs: it is run again with one thing idealised at a time.
struct Reason {
  std::string what;    // "host copies take no time"
  double saved_s = 0;  // of the total step
};
base::Result<std::vector<Reason>> why_they_part(const ModelShape& model, const Machine& machine,
                                                const StepOptions& options);

}  // namespace smartinf::sim
