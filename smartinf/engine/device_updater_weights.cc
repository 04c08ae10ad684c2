// DeviceUpdater: weights that do not stay in memory are fetched from the devices.
#include <fmt/format.h>

#include "smartinf/engine/device_updater.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;

plan::Subgroup DeviceUpdater::subgroup_at(uint64_t element) const {
  return set_.subgroups[set_.subgroup_at(element)];
}

Status DeviceUpdater::check_fetch(uint64_t first) const {
  if (!options_.stream_weights) {
    return Status(ErrorCode::kUnsupported, "weights are fetched without stream_weights",
                  "Set UpdaterOptions::stream_weights, for which the devices keep memory.");
  }
  if (subgroup_at(first).first != first) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("element {} is not the first of its subgroup", first),
                  "Fetch what subgroup_at() says.");
  }
  const std::lock_guard lock(mutex_);
  const Phase phase = protocol_.phase();
  const bool readable = phase != Phase::kUnwritten && phase != Phase::kBroken;
  return readable ? Status() : protocol_.require(Phase::kIdle, "fetch_weights");
}

Status DeviceUpdater::fetch_weights(uint64_t first, base::DataType type, void* out) {
  SI_RETURN_IF_ERROR(check_fetch(first));
  const size_t index = set_.subgroup_at(first);
  const plan::Subgroup& subgroup = set_.subgroups[index];
  const std::lock_guard lock(mutex_);
  const Phase phase = protocol_.phase();
  if (fetches_.under_way(index)) {
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("the weights from element {} on are being fetched already", first),
                  "Call wait_fetched() first.");
  }
  // Subgroups that the step skips stay as they are, and a commit waits for reads that were sent
  // before it.
  const bool sent_commit = phase == Phase::kCommitting || phase == Phase::kConfirming;
  const bool of_step = weights_are_new() && (updated_[index] != 0 || sent_commit);
  const bool served = of_step && update_type_ == type && fetches_.on_demand(index);
  // Weights that cannot be had from the update that runs come after it.
  if (of_step && !served) finish_update();
  fetches_.start(index, of_step && !served);
  const base::StepNumber step = of_step ? protocol_.step() : protocol_.committed_step();
  step_replies_.submit(set_.device_of(subgroup.id), csd::ReadWeights{subgroup.id, step, type, out},
                       of_step && !served ? DeviceReplies::Watch::kNo : DeviceReplies::Watch::kYes);
  return Status();
}

/// Whether the update of the step in progress has been started.
bool DeviceUpdater::weights_are_new() const {
  const Phase phase = protocol_.phase();
  return update_started_ && phase != Phase::kIdle && phase != Phase::kAborting;
}

void DeviceUpdater::finish_update() {
  if (!fetches_.update_waits()) return;
  fetches_.finish();
  if (protocol_.updating()) submit_to_all(csd::FinishUpdate{});
}

void DeviceUpdater::demand_nothing() {
  const std::lock_guard lock(mutex_);
  finish_update();
}

void DeviceUpdater::mark_on_demand(std::vector<csd::Update>& updates) {
  fetches_.finish();
  if (!options_.stream_weights) return;
  for (csd::Update& update : updates) {
    for (const csd::SubgroupUpdate& entry : update.updates) {
      if (entry.weights_out != nullptr) continue;
      update.mode = plan::UpdateMode::kOnDemand;
      fetches_.add_on_demand(entry.subgroup.value);
    }
  }
}

/// Why a fetch that waits for the commit cannot be waited for now; ok: it can.
Status DeviceUpdater::cannot_come() const {
  if (protocol_.committing()) return Status();
  if (!protocol_.error().ok()) return protocol_.error();
  if (protocol_.phase() == Phase::kBroken) return protocol_.require(Phase::kIdle, "wait_fetched");
  const auto refuse = [](const char* what, const char* advice) {
    return Status(ErrorCode::kFailedPrecondition, what, advice);
  };
  if (protocol_.phase() == Phase::kUpdating && !protocol_.updating()) {
    return refuse("these weights come after a commit that was not started",
                  "Call start_commit() first.");
  }
  return Status();
}

Status DeviceUpdater::wait_fetched(uint64_t first) {
  const size_t index = set_.subgroup_at(first);
  std::unique_lock lock(mutex_);
  if (!fetches_.under_way(index) && !fetches_.done(index)) {
    return Status(ErrorCode::kFailedPrecondition, "wait_fetched was called without a fetch",
                  "Call fetch_weights() first.");
  }
  Status refused;
  changed_.wait(lock, [&] {
    if (fetches_.done(index)) return true;
    if (fetches_.after_commit(index)) refused = cannot_come();
    return !refused.ok();
  });
  if (!fetches_.done(index)) return refused;
  Status status = fetches_.take(index);
  // The device that failed has the reason, not the one whose step was taken back.
  const bool cancelled = status.code() == ErrorCode::kCancelled;
  return cancelled && !protocol_.outcome().ok() ? protocol_.outcome() : status;
}

bool DeviceUpdater::weights_ready(size_t subgroup) const {
  const std::lock_guard lock(mutex_);
  return weights_ready_[subgroup] != 0;
}

bool DeviceUpdater::fetched(size_t subgroup) const {
  const std::lock_guard lock(mutex_);
  return fetches_.done(subgroup);
}

}  // namespace smartinf::engine
