// DeviceUpdater: the whole state is written (initialization, edit) or read.
#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/engine/device_updater.h"
#include "smartinf/engine/stored_run.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;
using csd::Completion;

namespace {

constexpr uint32_t kMaster = 1;  // in a mask of planes

/// Elements of one plane in one command when state is read.
constexpr uint64_t kReadElementsMax = 4 * base::kBlockElements;

}  // namespace

Status DeviceUpdater::initialize(const std::function<void(uint64_t, std::span<float>)>& fill,
                                 const std::string& client_metadata) {
  SI_RETURN_IF_ERROR(check_client_metadata(client_metadata));
  {
    const std::lock_guard lock(mutex_);
    if (protocol_.phase() != Phase::kUnwritten) {
      return Status(ErrorCode::kFailedPrecondition, "the devices hold state already",
                    "initialize() is for fresh devices only.");
    }
    SI_RETURN_IF_ERROR(protocol_.begin_edit());
    commit_client_metadata_ = client_metadata;
    keeping_ = new_residual_ = false;
  }
  Status written = on_all_devices(csd::BeginStep{0});
  if (written.ok()) written = fill_subgroups(fill);
  return commit_edit(false, std::move(written));
}

Status DeviceUpdater::fill_subgroups(const std::function<void(uint64_t, std::span<float>)>& fill) {
  // Two halves: one is filled while the other is being written.
  auto* floats = reinterpret_cast<float*>(staging_.data());
  const uint64_t half_elements = staging_.size() / sizeof(float) / 2;
  std::array<const csd::Command*, 2> halves{};  // in flight
  Status result;
  const auto finish_one = [&] {
    Completion completion = caller_replies_.next();
    for (auto& half : halves) {
      if (half == completion.command) half = nullptr;
    }
    if (result.ok()) result = std::move(completion.status);
  };
  for (const plan::Subgroup& subgroup : set_.subgroups) {
    if (halves[0] != nullptr && halves[1] != nullptr) finish_one();
    if (!result.ok()) break;
    SI_CHECK(subgroup.count <= half_elements, "a subgroup fits half of the staging buffer");
    const size_t half = halves[0] == nullptr ? 0 : 1;
    float* buffer = floats + half * half_elements;
    fill(subgroup.first, std::span<float>(buffer, subgroup.count));
    halves[half] = caller_replies_.submit(device_of(subgroup.id),
                                          csd::WriteState{subgroup.id, subgroup.count, {buffer}});
  }
  while (caller_replies_.owed() > 0) finish_one();
  return result;
}

Status DeviceUpdater::read_state(
    uint32_t plane_mask,
    const std::function<Status(uint64_t, std::span<const std::span<const float>>)>& visit) {
  const size_t plane_count = kernels::rule_planes(options_.rule.rule).size();
  return read_planes(plane_mask & ((1u << plane_count) - 1), plane_count, visit);
}

Status DeviceUpdater::read_planes(
    uint32_t plane_mask, size_t plane_count,
    const std::function<Status(uint64_t, std::span<const std::span<const float>>)>& visit) {
  SI_RETURN_IF_ERROR(wait_commit());
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kIdle, "reading the state"));
  }
  size_t wanted = 0;
  for (size_t p = 0; p < plane_count; ++p) wanted += (plane_mask >> p) & 1u;
  if (wanted == 0) return Status();

  // The staging buffer as a ring of pieces; reads run ahead, visits follow in order.
  const uint64_t floats = staging_.size() / sizeof(float);
  uint64_t piece = std::min(kReadElementsMax, floats / wanted / 2);
  piece = piece / base::kBlockElements * base::kBlockElements;
  SI_CHECK(piece > 0, "the staging buffer holds a block of every plane twice");
  const size_t pieces = floats / (piece * wanted);

  struct Piece {
    const csd::Command* command = nullptr;  // in flight
    uint64_t first = 0;
    std::array<std::span<const float>, 4> planes;
    Status status;
  };
  std::vector<Piece> ring(pieces);
  size_t next_subgroup = 0;
  uint64_t next_within = 0;
  size_t sent = 0;
  size_t visited = 0;
  auto* memory = reinterpret_cast<float*>(staging_.data());
  const auto send = [&] {
    const plan::Subgroup& subgroup = set_.subgroups[next_subgroup];
    Piece& slot = ring[sent % pieces];
    slot = Piece{};
    slot.first = subgroup.first + next_within;
    csd::ReadState read{subgroup.id, next_within, std::min(piece, subgroup.count - next_within)};
    float* out = memory + (sent % pieces) * piece * wanted;
    for (size_t p = 0; p < plane_count; ++p) {
      if (((plane_mask >> p) & 1u) == 0) continue;
      read.planes[p] = out;
      slot.planes[p] = {out, read.count};
      out += piece;
    }
    next_within += read.count;
    if (next_within == subgroup.count) {
      ++next_subgroup;
      next_within = 0;
    }
    ++sent;
    slot.command = caller_replies_.submit(device_of(subgroup.id), read);
  };
  const auto more = [&] { return next_subgroup < set_.subgroups.size(); };
  Status result;
  while (visited < sent || (result.ok() && more())) {
    while (result.ok() && more() && sent - visited < pieces) send();
    Piece& oldest = ring[visited % pieces];
    while (oldest.command != nullptr) {
      Completion completion = caller_replies_.next();
      for (Piece& candidate : ring) {
        if (candidate.command != completion.command) continue;
        candidate.command = nullptr;
        candidate.status = std::move(completion.status);
        break;
      }
    }
    if (result.ok()) result = std::move(oldest.status);
    if (result.ok()) {
      result = visit(oldest.first,
                     std::span<const std::span<const float>>(oldest.planes.data(), plane_count));
    }
    ++visited;
  }
  return result;
}

Status DeviceUpdater::edit_state(
    const std::function<base::Result<bool>(uint64_t, std::span<const std::span<float>>)>& edit,
    const std::string& client_metadata, const base::Bf16* residual,
    std::span<const kernels::StepAhead> ahead) {
  if (!ahead.empty() && ahead.size() != ahead_.size()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("rates of stepping ahead for {} groups given, the model has {}",
                              ahead.size(), ahead_.size()));
  }
  SI_RETURN_IF_ERROR(check_client_metadata(client_metadata));
  SI_RETURN_IF_ERROR(wait_commit());
  if (compressor_ == nullptr || !compressor_->feedback()) residual = nullptr;
  const bool write_residuals =
      residual != nullptr && set_.residual && options_.compress.residual_on_devices();
  base::StepNumber step = 0;
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kIdle, "editing the state"));
    SI_RETURN_IF_ERROR(protocol_.begin_edit());
    step = protocol_.step();
    // What compression keeps and is not given anew is the new step's as well.
    keeping_ = residual != nullptr ? write_residuals
                                   : set_.residual && residual_step_ == protocol_.committed_step();
    new_residual_ = residual != nullptr;
    samples_next_ = samples_current_ && !edit;
    next_ahead_ = ahead.empty() ? ahead_ : std::vector(ahead.begin(), ahead.end());
    commit_client_metadata_ = client_metadata;
  }
  Status written = on_all_devices(csd::BeginStep{step});
  if (written.ok() && edit) written = edit_subgroups(edit);
  if (residual != nullptr) compressor_->propose_residual(residual);
  return commit_edit(write_residuals, std::move(written));
}

Status DeviceUpdater::edit_subgroups(
    const std::function<base::Result<bool>(uint64_t, std::span<const std::span<float>>)>& edit) {
  const size_t plane_count = kernels::rule_planes(options_.rule.rule).size();
  uint64_t count_max = 0;
  for (const plan::Subgroup& subgroup : set_.subgroups) {
    count_max = std::max(count_max, subgroup.count);
  }
  SI_ASSIGN_OR_RETURN(edit_memory_,
                      base::AlignedBuffer::allocate(count_max * plane_count * sizeof(float)));
  auto* floats = reinterpret_cast<float*>(edit_memory_.data());
  for (const plan::Subgroup& subgroup : set_.subgroups) {
    csd::ReadState read{subgroup.id, 0, subgroup.count};
    csd::WriteState write{subgroup.id, subgroup.count, {}, (1u << plane_count) - 1};
    std::array<std::span<float>, 4> planes;
    for (size_t p = 0; p < plane_count; ++p) {
      read.planes[p] = floats + p * count_max;
      write.planes[p] = read.planes[p];
      planes[p] = {read.planes[p], subgroup.count};
    }
    SI_RETURN_IF_ERROR(on_device(device_of(subgroup.id), read));
    SI_ASSIGN_OR_RETURN(const bool changed, edit(subgroup.first, std::span<const std::span<float>>(
                                                                     planes.data(), plane_count)));
    if (changed) SI_RETURN_IF_ERROR(on_device(device_of(subgroup.id), write));
  }
  edit_memory_ = base::AlignedBuffer();
  return Status();
}

Status DeviceUpdater::find_samples() {
  if (weights_ahead_ == nullptr) return Status();
  SI_RETURN_IF_ERROR(wait_commit());
  if (samples_current_) return Status();
  const size_t plane = kernels::variance_plane(options_.rule.rule);
  SI_RETURN_IF_ERROR(
      read_state(1u << plane, [&](uint64_t first, std::span<const std::span<const float>> planes) {
        weights_ahead_->take(first, planes[plane]);
        return Status();
      }));
  samples_current_ = true;
  return Status();
}

void DeviceUpdater::step_ahead(uint64_t first, uint64_t count, void* weights, base::DataType type) {
  if (weights_ahead_ == nullptr) return;
  weights_ahead_->step({compressor_->residual(), ahead_}, first, count, weights, type);
}

Status DeviceUpdater::read_weights(
    const std::function<Status(uint64_t, std::span<const float>)>& visit) {
  SI_RETURN_IF_ERROR(find_samples());
  std::vector<float> weights;
  return read_state(kMaster, [&](uint64_t first, std::span<const std::span<const float>> planes) {
    if (weights_ahead_ == nullptr) return visit(first, planes.front());
    weights.assign(planes.front().begin(), planes.front().end());
    step_ahead(first, weights.size(), weights.data(), base::DataType::kF32);
    return visit(first, weights);
  });
}

Status DeviceUpdater::load_weights(base::DataType type, const WeightsSink& sink) {
  SI_RETURN_IF_ERROR(find_samples());
  std::byte* weights = nullptr;
  size_t of_subgroup = ~size_t{0};
  return read_state(kMaster, [&](uint64_t first, std::span<const std::span<const float>> planes) {
    const size_t index = set_.subgroup_at(first);
    const plan::Subgroup& subgroup = set_.subgroups[index];
    if (index != of_subgroup) {
      of_subgroup = index;
      weights = static_cast<std::byte*>(sink(subgroup.first));
    }
    if (weights != nullptr) {
      std::byte* out = weights + (first - subgroup.first) * base::data_type_bytes(type);
      kernels::kernels().cast_from_f32(planes[0].data(), out, type, planes[0].size());
      step_ahead(first, planes[0].size(), out, type);
    }
    return Status();
  });
}

Result<StoredRun> DeviceUpdater::snapshot() {
  std::vector<std::unique_ptr<csd::Snapshot>> snapshots;
  for (const auto& device : set_.devices) {
    auto snapshot = device->snapshot();
    if (!snapshot.ok()) {
      return std::move(snapshot).status().with_context("device " + device->info().name);
    }
    snapshots.push_back(std::move(*snapshot));
  }
  return join_snapshots(std::move(snapshots));
}

}  // namespace smartinf::engine
