// Commands that read or write a subgroup's planes as f32: initialization, resume, export, import.
// Several are in flight at once, one per slot, and are answered as they get done.
#pragma once

#include <cstdint>

#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/device_parts.h"

namespace smartinf::csd {

/// Threads: the device's I/O thread.
class StateAccess {
 public:
  explicit StateAccess(DeviceParts& parts) : parts_(parts) {}

  /// Serves a ReadState or WriteState command; false when it must wait (no slot is free, or a
  /// command of the other kind is in flight).
  bool try_start(Command& command);
  bool idle() const { return in_flight_ == 0; }
  /// The store cannot go on: see TransferHandler::abandon.
  void abandon(const base::Status& status);
  /// A write failed in this step: it must not be prepared. Ok again after forget_failure().
  const base::Status& write_failure() const { return write_failure_; }
  void forget_failure() { write_failure_ = base::Status(); }

  void on_transfer(Transfer& transfer);
  void on_job(Job& job);

 private:
  base::Status check(base::SubgroupId subgroup, uint64_t first, uint64_t count, bool whole) const;
  void start_read(Slot& slot, const ReadState& read);
  void start_write(Slot& slot, const WriteState& write);
  void decode(Slot& slot, const ReadState& read);
  void answer(Slot& slot, base::Status status);

  DeviceParts& parts_;
  uint32_t in_flight_ = 0;
  bool writes_ = false;  // those in flight
  bool abandoned_ = false;
  base::Status abandoned_for_;
  base::Status write_failure_;
};

}  // namespace smartinf::csd
