#include "smartinf/csd/device_step.h"

#include <utility>

namespace smartinf::csd {
namespace {

base::Status step_out_of_order(const std::string& why, base::StepNumber step) {
  return csd::out_of_order("step " + std::to_string(step) + ": " + why);
}

}  // namespace

bool DeviceStep::is_committed(base::StepNumber step) const {
  const storage::StoreState state = parts_.store->state();
  return state.complete && state.committed_step == step;
}

base::Status DeviceStep::check(const Command& command) const {
  if (command.as<ReadState>() != nullptr && !parts_.store->state().initialized) {
    return csd::out_of_order("there is no committed state to read");
  }
  const bool from_committed = command.as<Update>() != nullptr || command.as<Prefetch>() != nullptr;
  if (from_committed && !parts_.store->state().initialized) {
    return csd::out_of_order("there is no committed state to update");
  }
  const bool in_step = command.as<Update>() != nullptr || command.as<WriteState>() != nullptr ||
                       command.as<Prefetch>() != nullptr;
  if (in_step && !begun()) {
    return csd::out_of_order("state is updated and written in a step only");
  }
  return base::Status();
}

base::Status DeviceStep::begin(base::StepNumber step) {
  // A new store stands in step 0 already.
  if (begun() && step == 0 && number_ == 0) return base::Status();
  if (!between_steps()) return step_out_of_order("another step is in progress", step);
  SI_RETURN_IF_ERROR(lost_);  // the store takes no step any more
  if (step != parts_.store->state().committed_step + 1) {
    return step_out_of_order("it does not follow the committed one", step);
  }
  parts_.store->begin_step(step);
  phase_ = Phase::kBegun;
  number_ = step;
  return base::Status();
}

base::Status DeviceStep::check_prepare(const Prepare& prepare, const base::Status& failure) const {
  if (begun() && prepare.step == number_) return failure;
  return step_out_of_order("it has not begun", prepare.step);
}

base::Status DeviceStep::prepare(const Prepare& prepare, const base::Status& failure) {
  SI_RETURN_IF_ERROR(check_prepare(prepare, failure));
  SI_RETURN_IF_ERROR(parts_.store->prepare(prepare.step, prepare.client_metadata));
  phase_ = Phase::kPrepared;
  return base::Status();
}

base::Status DeviceStep::commit(base::StepNumber step) {
  if (phase_ != Phase::kPrepared || step != number_) {
    if (!is_committed(step)) return step_out_of_order("it is not prepared", step);
    return lost_.ok() ? commit_answer_ : lost_;
  }
  phase_ = Phase::kIdle;
  parts_.cache.commit();
  commit_answer_ = parts_.store->commit(step);
  return commit_answer_;
}

base::Status DeviceStep::abort(base::StepNumber step) {
  if (is_committed(step)) return step_out_of_order("it is committed", step);
  // Aborting what never began is what it asks for; so is what was aborted before.
  if (between_steps()) return lost_;
  if (step != number_) return step_out_of_order("another one is in progress", step);
  phase_ = Phase::kIdle;
  lost_ = parts_.store->abort(step);
  if (lost_.ok()) {
    parts_.cache.abort();
  } else {
    parts_.cache.drop();
  }
  return lost_;
}

}  // namespace smartinf::csd
