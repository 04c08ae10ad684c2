// One of several ranks of `smartinf train` (docs/ranks.md), with its part of what the ranks of a
// machine share: the one with the most devices and micro batches, for which the others wait. What
// it gets from the others comes as fast as they get what it sends.
#pragma once

#include <cstdint>

#include "smartinf/base/status.h"
#include "smartinf/sim/machine.h"
#include "smartinf/sim/step.h"

namespace smartinf::sim {

/// Traffic of a rank with all others.
struct Exchange {
  uint32_t ranks = 1;
  double share = 1;                // of the parameters: those whose state is on its devices
  double gradient_sent = 0;        // bytes of a parameter, of its sums over micro batches
  double gradient_received = 0;    // of those of all other ranks
  uint64_t gradient_kept = 0;      // bytes of a parameter until it is sent
  double compress_s = 0;           // of a parameter, before it is sent
  double near = 0;                 // share of the other ranks that is on its machine
  double near_bytes_per_s = 0;     // to those, and from them; 0: without limit
  double far_bytes_per_s = 0;      // likewise, to those of other machines
  double latency_s = 0;
  double cores_bytes_per_s = 0;  // of the rank's cores, sent and received; 0: it takes none
};

struct OneRank {
  Machine machine;
  StepOptions options;
  Exchange exchange;
};

/// Ok, or why such ranks cannot be: kInvalidArgument for numbers that do not agree, kUnsupported
/// for what the ranks of `smartinf train` do not do.
base::Status check_ranks(const Machine& machine, const StepOptions& options);

/// The part of a machine that one of its ranks has: of those with the most devices. share: of its
/// devices' rates; may be null.
Machine part_of_machine(const Machine& machine, uint32_t ranks, double* share = nullptr);

/// options.ranks that were checked; of one rank everything.
OneRank one_rank(const Machine& machine, const StepOptions& options);

/// Devices of all machines, and the most that one rank drives.
uint64_t devices_of_all(const Machine& machine, const StepOptions& options);
uint64_t devices_of_one(const Machine& machine, const StepOptions& options);

}  // namespace smartinf::sim
