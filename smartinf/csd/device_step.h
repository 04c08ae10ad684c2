// The step that a device is in: what may follow what, and what a commit or an abort that is asked
// for again is answered.
#pragma once

#include <cstdint>
#include <string>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"
#include "smartinf/csd/device_parts.h"

namespace smartinf::csd {

/// A command that comes at the wrong time; why says what would have to be so.
inline base::Status out_of_order(const std::string& why) {
  return base::Status(base::ErrorCode::kFailedPrecondition, why);
}

///   between steps --begin--> begun --prepare--> prepared --commit--> between steps
///                            begun or prepared --abort--> between steps
///
/// Threads: the device's I/O thread, with nothing in flight.
class DeviceStep {
 public:
  explicit DeviceStep(DeviceParts& parts) : parts_(parts) {}

  /// A new store stands in step 0.
  void begin_new_store() { phase_ = Phase::kBegun; }
  /// Errors of all: kFailedPrecondition at the wrong time; the store's.
  base::Status begin(base::StepNumber step);
  /// failure: of anything that the step needs.
  /// Why it cannot be prepared; failure: of what was done in it.
  base::Status check_prepare(const Prepare& prepare, const base::Status& failure) const;
  base::Status prepare(const Prepare& prepare, const base::Status& failure);
  base::Status commit(base::StepNumber step);
  base::Status abort(base::StepNumber step);

  /// Whether reads, writes and updates of state come at the right time; ok for other commands.
  base::Status check(const Command& command) const;

  bool between_steps() const { return phase_ == Phase::kIdle; }
  /// State can be updated and written.
  bool begun() const { return phase_ == Phase::kBegun; }
  base::StepNumber number() const { return number_; }  // unless between steps
  /// Why no step can be trusted: one could not be aborted, and what lies here is of none.
  const base::Status& lost() const { return lost_; }

 private:
  enum class Phase : uint8_t { kIdle, kBegun, kPrepared };
  bool is_committed(base::StepNumber step) const;

  DeviceParts& parts_;
  Phase phase_ = Phase::kIdle;
  base::StepNumber number_ = 0;
  base::Status lost_;
  base::Status commit_answer_;  // of the committed step
};

}  // namespace smartinf::csd
