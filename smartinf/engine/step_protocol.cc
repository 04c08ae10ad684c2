#include "smartinf/engine/step_protocol.h"

#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

StepProtocol::StepProtocol(const Options& options)
    : devices_(options.devices),
      agrees_(options.agrees),
      written_(options.written),
      committed_step_(options.committed_step),
      phase_(options.written ? Phase::kIdle : Phase::kUnwritten) {}

// ---- Calls.

Status StepProtocol::require(Phase phase, std::string_view what) const {
  if (phase_ == phase) return Status();
  if (phase_ == Phase::kBroken) {
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("{} was called after the devices failed to agree on a step ({})",
                              what, broken_by_),
                  "Open the updater again, which recovers the last committed step.");
  }
  if (phase_ == Phase::kUnwritten) {
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("{} was called before the initial state was written", what),
                  "Call initialize() first.");
  }
  return Status(
      ErrorCode::kFailedPrecondition, fmt::format("{} was called out of order", what),
      "The calls of a step are begin_step, put_gradient, finish_gradients, start_update, commit.");
}

Status StepProtocol::begin_step() {
  SI_RETURN_IF_ERROR(require(Phase::kIdle, "begin_step"));
  phase_ = Phase::kGradients;
  error_ = Status();
  early_ = false;
  return Status();
}

Status StepProtocol::start_early_update(size_t devices) {
  SI_RETURN_IF_ERROR(require(Phase::kGradients, "start_early_update"));
  if (early_) {
    return Status(ErrorCode::kFailedPrecondition, "start_early_update was called twice in one step",
                  "Call start_update() next.");
  }
  early_ = true;
  updates_in_flight_ = devices;
  return Status();
}

Status StepProtocol::finish_gradients() {
  if (phase_ != Phase::kSummed) SI_RETURN_IF_ERROR(require(Phase::kGradients, "finish_gradients"));
  phase_ = Phase::kSummed;
  return Status();
}

Status StepProtocol::start_update(size_t devices) {
  SI_RETURN_IF_ERROR(require(Phase::kSummed, "start_update"));
  phase_ = Phase::kUpdating;
  updates_in_flight_ += devices;
  return Status();
}

Status StepProtocol::begin_edit() {
  if (phase_ != Phase::kUnwritten) SI_RETURN_IF_ERROR(require(Phase::kIdle, "edit_state"));
  phase_ = Phase::kEditing;
  error_ = Status();
  return Status();
}

Result<StepProtocol::Next> StepProtocol::start_commit(bool residual, Status written) {
  if (committing_) {
    return Status(ErrorCode::kFailedPrecondition, "a step is already being committed",
                  "Call wait_commit() first.");
  }
  if (phase_ != Phase::kEditing) SI_RETURN_IF_ERROR(require(Phase::kUpdating, "start_commit"));
  if (error_.ok()) error_ = std::move(written);
  committing_ = true;
  residual_ = residual;
  abort_failed_ = false;
  return updates_in_flight_ == 0 ? proceed() : Next::kWait;
}

Result<StepProtocol::Next> StepProtocol::abort() {
  outcome_ = Status();  // a failed commit has aborted its step
  if (phase_ == Phase::kIdle || phase_ == Phase::kUnwritten) return Next::kWait;
  if (phase_ == Phase::kBroken) return require(Phase::kIdle, "abort");
  committing_ = true;
  abort_failed_ = false;
  error_ = Status();
  return enter(Phase::kAborting, Next::kAbort);
}

// ---- Answers.

// Work that is aborted may end with errors, which are nobody's.
void StepProtocol::failed(Status status) {
  if (phase_ != Phase::kAborting && error_.ok()) error_ = std::move(status);
}

StepProtocol::Next StepProtocol::update_ended(Status status) {
  SI_CHECK(updates_in_flight_ > 0, "an update that nobody started has ended");
  failed(std::move(status));
  --updates_in_flight_;
  return proceed();
}

StepProtocol::Next StepProtocol::answered(Status status) {
  SI_CHECK(answers_due_ > 0, "an answer that nobody waits for");
  if (!status.ok() && phase_ == Phase::kAborting) abort_failed_ = true;
  if (error_.ok()) error_ = std::move(status);
  --answers_due_;
  return proceed();
}

StepProtocol::Next StepProtocol::enter(Phase phase, Next next) {
  phase_ = phase;
  answers_due_ = devices_;
  return next;
}

StepProtocol::Next StepProtocol::end(Phase phase, Status outcome) {
  phase_ = phase;
  if (phase == Phase::kBroken) broken_by_ = outcome.what();
  outcome_ = std::move(outcome);
  error_ = Status();
  committing_ = false;
  return Next::kWait;
}

StepProtocol::Next StepProtocol::agree(Phase phase) {
  phase_ = phase;
  answers_due_ = 1;
  return Next::kAgree;
}

StepProtocol::Next StepProtocol::agreed(Status status, bool known) {
  SI_CHECK(phase_ == Phase::kAgreeing || phase_ == Phase::kConfirming,
           "an agreement that nobody asked for");
  answers_due_ = 0;
  // The others may have committed or aborted: what is prepared stays, for opening again to decide.
  if (!known) return end(Phase::kBroken, std::move(status));
  if (phase_ == Phase::kConfirming) {
    return status.ok() ? count() : end(Phase::kBroken, std::move(status));
  }
  if (status.ok()) return enter(Phase::kCommitting, Next::kCommit);
  error_ = std::move(status);
  return give_up();
}

StepProtocol::Next StepProtocol::count() {
  committed_step_ = step();
  written_ = true;
  end(Phase::kIdle, Status());
  return Next::kCommitted;
}

// Step 0 leaves nothing that could be gone back to.
StepProtocol::Next StepProtocol::give_up() {
  if (!written_) return end(Phase::kUnwritten, std::move(error_));
  return enter(Phase::kAborting, Next::kAbort);
}

StepProtocol::Next StepProtocol::proceed() {
  if (!committing_ || updates_in_flight_ > 0 || answers_due_ > 0) return Next::kWait;
  switch (phase_) {
    case Phase::kUpdating:
    case Phase::kEditing:
      if (error_.ok() && residual_) return enter(Phase::kPersisting, Next::kWriteResidual);
      [[fallthrough]];
    case Phase::kPersisting:
      if (error_.ok()) return enter(Phase::kPreparing, Next::kPrepare);
      return agrees_ ? agree(Phase::kAgreeing) : give_up();
    case Phase::kPreparing:
      if (agrees_) return agree(Phase::kAgreeing);
      if (!error_.ok()) return give_up();
      return enter(Phase::kCommitting, Next::kCommit);
    case Phase::kCommitting:
      // Every device was prepared, so whichever failed now, opening again rolls the step forward
      // or back on all of them. Here it cannot be known which.
      if (agrees_) return agree(Phase::kConfirming);
      return error_.ok() ? count() : end(Phase::kBroken, std::move(error_));
    case Phase::kAborting:
      // The caller hears of the error that led here.
      return end(abort_failed_ ? Phase::kBroken : Phase::kIdle, std::move(error_));
    default:
      break;
  }
  SI_CHECK(false, "an answer outside of a commit");
  return Next::kWait;
}

}  // namespace smartinf::engine
