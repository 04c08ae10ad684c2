// DeviceUpdater: the whole state is written (initialization, edit) or read.
#include <utility>

#include <fmt/format.h>

#include "smartinf/csd/snapshot.h"
#include "smartinf/engine/device_updater.h"
#include "smartinf/engine/stored_run.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

constexpr uint32_t kMaster = 1;  // in a mask of planes

}  // namespace

Status DeviceUpdater::initialize(const WholeState::Fill& fill, const std::string& client_metadata) {
  SI_RETURN_IF_ERROR(check_client_metadata(client_metadata));
  {
    const std::lock_guard lock(mutex_);
    if (protocol_.phase() != Phase::kUnwritten) {
      return Status(ErrorCode::kFailedPrecondition, "the devices hold state already",
                    "initialize() is for fresh devices only.");
    }
    SI_RETURN_IF_ERROR(protocol_.begin_edit());
    next_metadata_ = {client_metadata, std::nullopt, {}};
    next_text_ = client_metadata;
  }
  Status written = state_.on_all_devices(csd::BeginStep{0});
  if (written.ok()) written = state_.fill(fill);
  {
    const std::lock_guard lock(mutex_);
    SI_ASSIGN_OR_RETURN(const Next next, protocol_.start_commit(false, std::move(written)));
    act(next);
  }
  return wait_commit();
}

Status DeviceUpdater::edit_state(const WholeState::Edit& edit, const std::string& client_metadata,
                                 const CompressionState& compression) {
  const auto load = tables_ == nullptr ? nullptr : tables_->take_load();
  SI_RETURN_IF_ERROR(check_client_metadata(client_metadata));
  SI_RETURN_IF_ERROR(be_idle("edit_state"));
  base::StepNumber step = 0;
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.begin_edit());
    step = protocol_.step();
    update_started_ = false;
  }
  const bool changes = static_cast<bool>(edit);
  Status written = state_.on_all_devices(csd::BeginStep{step});
  if (written.ok() && changes) written = state_.edit(edit);
  if (written.ok() && load) written = load();
  {
    const std::lock_guard lock(mutex_);
    next_metadata_ = {client_metadata, metadata_.residual_step, {}};
    bool writes = false;
    if (written.ok()) {
      auto started = path_->start_commit_of_edit(compression, changes, step, next_metadata_);
      auto text = started.ok() ? join_metadata(next_metadata_)
                               : base::Result<std::string>(started.status());
      if (text.ok()) {
        writes = *started;
        next_text_ = *std::move(text);
      } else {
        written = std::move(text).status();
      }
    }
    SI_ASSIGN_OR_RETURN(const Next next, protocol_.start_commit(writes, std::move(written)));
    act(next);
  }
  return wait_commit();
}

Status DeviceUpdater::read_state(uint32_t plane_mask, const WholeState::Visit& visit) {
  SI_RETURN_IF_ERROR(be_idle("read_state"));
  const size_t plane_count = state_.plane_count();
  return state_.read(plane_mask & ((1u << plane_count) - 1), plane_count, visit);
}

Status DeviceUpdater::read_weights(
    const std::function<Status(uint64_t, std::span<const float>)>& visit) {
  SI_RETURN_IF_ERROR(be_idle("read_weights"));
  SI_RETURN_IF_ERROR(path_->prepare_weights());
  std::vector<float> weights;
  return read_state(kMaster, [&](uint64_t first, std::span<const std::span<const float>> planes) {
    if (!path_->adjusts_weights()) return visit(first, planes.front());
    weights.assign(planes.front().begin(), planes.front().end());
    path_->adjust_weights(first, weights.size(), weights.data(), base::DataType::kF32);
    return visit(first, weights);
  });
}

Status DeviceUpdater::load_weights(base::DataType type, const WeightsSink& sink) {
  SI_RETURN_IF_ERROR(be_idle("load_weights"));
  SI_RETURN_IF_ERROR(path_->prepare_weights());
  std::vector<std::byte*> places;  // of every subgroup
  for (const plan::Subgroup& subgroup : set_.subgroups) {
    places.push_back(static_cast<std::byte*>(sink(subgroup.first)));
  }
  const auto take = [&](uint64_t first, std::span<const std::span<const float>> planes) {
    const size_t index = set_.subgroup_at(first);
    std::byte* out =
        places[index] + (first - set_.subgroups[index].first) * base::data_type_bytes(type);
    kernels::kernels().cast_from_f32(planes[0].data(), out, type, planes[0].size());
    path_->adjust_weights(first, planes[0].size(), out, type);
    return Status();
  };
  return state_.read(kMaster, 1, take, [&](const plan::Subgroup& subgroup) {
    return places[subgroup.id.value] != nullptr;
  });
}

Result<StoredRun> DeviceUpdater::snapshot() {
  std::vector<std::unique_ptr<csd::Snapshot>> snapshots;
  for (const auto& device : set_.devices) {
    auto snapshot = device->snapshot();
    if (!snapshot.ok()) {
      return std::move(snapshot).status().with_context("device " + device->info().name);
    }
    // It is read by its name, and the device is open whatever has that name now.
    const storage::StoreState state = (*snapshot)->state(), ours = device->state();
    if (!(state.run == ours.run) || state.device_index != ours.device_index) {
      return Status(ErrorCode::kUnavailable,
                    fmt::format("device {}: another state is in its place now, of run {}; this "
                                "one is of run {}",
                                device->info().name, state.run.to_string().substr(0, 8),
                                ours.run.to_string().substr(0, 8)),
                    "The folder was exchanged while the run had it open: put it back.");
    }
    snapshots.push_back(std::move(*snapshot));
  }
  return join_snapshots(std::move(snapshots));
}

}  // namespace smartinf::engine
