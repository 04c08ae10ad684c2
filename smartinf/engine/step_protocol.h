// A step over several devices, as a pure state machine: which call is allowed when, and what every
// device is sent next. It does nothing itself: no threads, no locks, no I/O.
//
//   step             begin_step -> finish_gradients -> start_update -> start_commit
//                    (start_early_update between the first two: by a guess of its options)
//   initialization   begin_edit -> start_commit      (step 0, which cannot be aborted)
//   edit             begin_edit -> start_commit
//
// From start_commit() on the answers of the devices drive it: residuals written, all prepared, all
// committed; or after a failure all aborted. A step counts when every device has committed it.
//
// Where several ranks share the run each has one of these over its own devices. Between prepare and
// commit they agree that all have prepared, or what the first failure was; and before the step
// counts, that all have committed. So a rank goes no further than the others know of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"

namespace smartinf::engine {

class StepProtocol {
 public:
  enum class Phase : uint8_t {
    kUnwritten,   // step 0 is still to be initialized
    kIdle,        // between steps
    kGradients,   // begun; gradients come in
    kSummed,      // their norm is known
    kUpdating,    // devices update; weights come up
    kEditing,     // state is written from outside
    kPersisting,  // the residual of compressed gradients is written
    kPreparing,
    kAgreeing,  // agrees: whether all ranks have prepared
    kCommitting,
    kConfirming,  // agrees: whether all ranks have committed
    kAborting,
    kBroken,  // the devices may disagree: only opening again can tell
  };
  /// The owner's next action. All but kWait, kAgree and kCommitted go to every device, and each
  /// device answers once.
  enum class Next : uint8_t {
    kWait,           // for a call or an answer
    kWriteResidual,  // answered() when all of a device's is written, or at its first failure
    kPrepare,
    kAgree,  // agreed() with what all ranks say; this one says error()
    kCommit,
    kAbort,
    kCommitted,  // the step counts; phase() is kIdle
  };

  struct Options {
    size_t devices = 1;
    bool written = false;  // there is a committed step
    base::StepNumber committed_step = 0;
    bool agrees = false;  // several ranks commit together
  };
  explicit StepProtocol(const Options& options);

  // Calls of the trainer. Errors: kFailedPrecondition for a call out of order; nothing has changed
  // then. None may come while committing().
  base::Status begin_step();
  /// Once, before finish_gradients(). devices: as for start_update().
  base::Status start_early_update(size_t devices);
  /// Again allowed after itself.
  base::Status finish_gradients();
  /// devices: how many have something to update.
  base::Status start_update(size_t devices);
  base::Status begin_edit();
  /// After start_update(), whether that has ended or not, and after begin_edit(). written: of an
  /// edit; a failure aborts it. residual: it is written before the step is prepared.
  base::Result<Next> start_commit(bool residual, base::Status written = {});
  /// Nothing where no step is in progress.
  base::Result<Next> abort();
  /// Ok in that phase. what: the name of the call, for the error's text.
  base::Status require(Phase phase, std::string_view what) const;

  // Answers of devices.
  /// Of a device's update, early or not; whatever else of it failed before.
  Next update_ended(base::Status status);
  /// To what Next said.
  Next answered(base::Status status);
  /// Takes what the ranks have agreed on. known: false if this one could not find out.
  Next agreed(base::Status status, bool known);
  /// Something of the step failed that is no answer.
  void failed(base::Status status);

  Phase phase() const { return phase_; }
  bool updating() const { return updates_in_flight_ > 0; }
  /// The step in progress has had an early update.
  bool early() const { return early_; }
  /// From start_commit() or abort() until the outcome is known.
  bool committing() const { return committing_; }
  /// The outcome of the last of them, once.
  base::Status take_outcome() { return std::exchange(outcome_, base::Status()); }
  const base::Status& outcome() const { return outcome_; }
  /// The first failure of the step in progress.
  const base::Status& error() const { return error_; }
  base::StepNumber committed_step() const { return committed_step_; }
  /// The one in progress, or the next.
  base::StepNumber step() const { return written_ ? committed_step_ + 1 : 0; }

 private:
  Next proceed();
  Next enter(Phase phase, Next next);
  Next end(Phase phase, base::Status outcome);
  Next give_up();
  Next agree(Phase phase);
  Next count();

  const size_t devices_;
  const bool agrees_;
  bool written_;
  base::StepNumber committed_step_;
  Phase phase_;
  bool early_ = false;
  size_t updates_in_flight_ = 0;
  size_t answers_due_ = 0;
  bool committing_ = false;
  bool residual_ = false;
  bool abort_failed_ = false;
  base::Status error_;
  base::Status outcome_;
  std::string broken_by_;
};

}  // namespace smartinf::engine
