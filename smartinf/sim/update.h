// The optimizer step alone, without a model: what `smartinf bench step` and `bench scale` time, on
// the virtual clock. The order of the work is plan::make_schedule's, as in the transfer handler.
#pragma once

#include <cstdint>

#include "smartinf/base/status.h"
#include "smartinf/plan/schedule.h"

namespace smartinf::sim {

/// Equal devices that share the parameters evenly. Rates are bytes per second; 0: no limit.
struct UpdateShape {
  uint64_t parameters = 0;
  uint32_t devices = 1;
  uint64_t subgroup_elements = 0;
  uint32_t slots = 3;
  plan::ScheduleVariant schedule = plan::ScheduleVariant::kOverlapped;

  // Bytes per parameter.
  double master = 4;
  double moments = 8;
  double gradient = 2;  // on the host link, or of the spill
  double weight = 2;

  /// Host update: state, and gradients where they are spilled, cross the host link both ways;
  /// weights stay in host memory.
  bool host_update = false;
  /// Gradients are written to the drives before the update and read again in it.
  bool gradient_spilled = false;
  /// Bytes of state that stay in memory as well, all devices together: not read from the drives,
  /// and with cached_writes_wait (durability "none") not written in the step.
  uint64_t state_cache_bytes = 0;
  bool cached_writes_wait = false;

  double drive_read_bytes_per_s = 0;  // of each device
  double drive_write_bytes_per_s = 0;
  bool shared_budget = false;      // reads and writes draw on one budget of time
  double host_up_bytes_per_s = 0;  // shared by all devices
  double host_down_bytes_per_s = 0;
  double link_catch_up_s = 0;   // idle time that links and drives make good behind it (csd::Link)
  bool links_in_order = false;  // a transfer has a link or drive for itself, as csd::Link books
  bool host_shared_budget = false;  // its two directions draw on one budget of time
  double update_params_per_s = 0;   // of all processors together; a device alone may use them all
  /// Drives in memory: what they move takes the processors' time. 0: drives that move it
  /// themselves.
  double copy_bytes_per_s = 0;
  double gradient_params_per_s = 0;  // all host threads together: copy gradients, find their norm
  /// Compressed gradients: so many host threads select and pack them, each a subgroup at a time and
  /// two messages ahead, when the norm is known. The rate is one thread's beside the others; 0:
  /// whole gradients.
  double select_params_per_s = 0;
  uint32_t select_threads = 1;
};

struct UpdateTimes {
  double gradient_s =
      0;                 // until the norm is known: whole gradients are down, others in host memory
  double update_s = 0;   // from there until everything is written
  double weights_s = 0;  // of it, until all new weights are up
  double total_s() const { return gradient_s + update_s; }
};

/// Pure; deterministic to the bit. An update starts when all gradients are there, since clipping
/// needs their norm, and on each device when its spilled ones are written; a compressed one when
/// all messages are down. Errors: kInvalidArgument (no parameters, devices, slots or subgroups;
/// more than 10^6 subgroups).
base::Result<UpdateTimes> simulate_update(const UpdateShape& shape);

}  // namespace smartinf::sim
