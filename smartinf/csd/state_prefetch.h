// Reads ahead: while the gradients of a step come in, the state that its update will want first
// goes into slots that are free.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/device_parts.h"

namespace smartinf::csd {

/// Reads state ahead of the update, into Slot::prefetched; whoever uses a slot for something else
/// clears that. A read that fails leaves nothing: the update reads again and says why.
/// Threads: the device's I/O thread.
class StatePrefetch {
 public:
  explicit StatePrefetch(DeviceParts& parts) : parts_(parts) {}

  /// The i-th of these subgroups goes into the i-th slot, where an update that takes them in this
  /// order has its i-th. Those whose state is in the state cache are left out.
  /// Errors: kInvalidArgument for a subgroup of another device.
  base::Status start(std::span<const base::SubgroupId> subgroups);
  /// A step begins: what was read for the one before is not the committed state any more.
  void forget();
  /// Starts no more reads.
  void stop() { next_ = subgroups_.size(); }

  void on_transfer(Transfer& transfer);

 private:
  void start_reads();

  DeviceParts& parts_;
  std::vector<uint32_t> subgroups_;  // by slot: index in the layout
  size_t next_ = 0;                  // in subgroups_
  uint32_t in_flight_ = 0;
};

}  // namespace smartinf::csd
