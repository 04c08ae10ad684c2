// Access for a family of messages beside steps: as they come, whatever else is under way.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/device_parts.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/storage/store.h"

namespace smartinf::csd {

/// Threads: the device's I/O thread. An access that has threads of its own has nothing to do there
/// but serve(), and answers what is left when it is destroyed.
class BesideAccess {
 public:
  virtual ~BesideAccess() = default;

  /// Whether a command is of its family.
  virtual bool serves(const Command& command) const = 0;
  /// Answers it when it is done; at once with `refusal`, unless that is ok.
  virtual void serve(Command& command, base::Status refusal) = 0;
  /// A transfer that has ended: whether it was one of its own.
  virtual bool took(storage::SubgroupIo& io) = 0;
  /// The store has something to do for it.
  virtual bool moving() const = 0;
  /// Nothing is unanswered.
  virtual bool idle() const = 0;
  /// The store cannot go on.
  virtual void abandon(const base::Status& status) = 0;
  /// Answers what has passed the host link.
  virtual void on_time(uint64_t now_ns) = 0;
  /// When on_time() will have something to do; ~0: nothing is on the link.
  virtual uint64_t next_due_ns() const = 0;

  // Steps, of a family whose state is committed with the store's. The store does the same right
  // after prepare(), and right before the three others. prepare() returns what is to be kept with
  // the step (storage/row_commit.h).
  virtual void begin_step(base::StepNumber) {}
  virtual base::Result<std::string> prepare(base::StepNumber) { return std::string(); }
  virtual base::Status commit(base::StepNumber) { return base::Status(); }
  virtual base::Status abort(base::StepNumber) { return base::Status(); }

  /// Its tables as they are committed, to be read between steps while the device lives; null: it
  /// has none open. Threads: any.
  virtual std::unique_ptr<RowSnapshot> rows_snapshot() { return nullptr; }

  /// Bytes at the drive that the store does not count. Threads: any.
  virtual base::TrafficReading traffic() const { return {}; }
};

/// One of each family that is served so.
std::vector<std::unique_ptr<BesideAccess>> make_beside_accesses(DeviceParts& parts);

}  // namespace smartinf::csd
