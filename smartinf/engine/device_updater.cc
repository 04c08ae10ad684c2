#include "smartinf/engine/device_updater.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/kernels/feedback.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;
using csd::Completion;

namespace {

Status client_metadata_too_long() {
  return Status(
      ErrorCode::kInvalidArgument, "the data to be kept with a step is too long",
      fmt::format("It may take {}.", base::format_bytes(storage::Store::kClientMetadataBytesMax)));
}

constexpr uint32_t kMaster = 1;  // in a mask of planes

/// Elements of one plane in one command when state is read.
constexpr uint64_t kReadElementsMax = 4 * base::kBlockElements;

}  // namespace

base::Result<std::unique_ptr<Updater>> DeviceUpdater::make(const UpdaterOptions& options,
                                                           const plan::ParameterSpace& space,
                                                           DeviceSet set) {
  SI_ASSIGN_OR_RETURN(auto staging, base::AlignedBuffer::allocate(set.staging_bytes));
  std::unique_ptr<compress::GradientCompressor> compressor;
  if (options.compress.on()) {
    SI_ASSIGN_OR_RETURN(compressor, compress::GradientCompressor::make(
                                        options.compress, space.count(), options.seed,
                                        matrices_of_squares(options, space)));
  }
  std::unique_ptr<DeviceUpdater> made(
      new DeviceUpdater(options, space, std::move(set), std::move(staging), std::move(compressor)));
  SI_RETURN_IF_ERROR(made->recall_residual());
  return std::unique_ptr<Updater>(std::move(made));
}

DeviceUpdater::DeviceUpdater(const UpdaterOptions& options, const plan::ParameterSpace& space,
                             DeviceSet set, base::AlignedBuffer staging,
                             std::unique_ptr<compress::GradientCompressor> compressor)
    : options_(options),
      space_(space),
      set_(std::move(set)),
      staging_(std::move(staging)),
      watch_(options_.device_silence_max),
      gradient_tracker_(space_),
      team_(gradient_threads(), "si-gradient"),
      gradient_sender_(set_, gradient_tracker_, team_, options_.gradient_type, watch_),
      compressor_(std::move(compressor)),
      compressed_sender_(compressor_ == nullptr
                             ? nullptr
                             : std::make_unique<CompressedSender>(*compressor_, team_, watch_)),
      phase_(set_.fresh ? Phase::kUnwritten : Phase::kIdle),
      committed_step_(set_.step),
      client_metadata_(),
      weights_ready_(set_.subgroups.size(), 0),
      updated_(set_.subgroups.size(), 0) {
  samples_current_ = samples_next_ = set_.fresh;  // all variances are 0
  if (!set_.fresh) {
    KeptBlob kept = split_blob(set_.devices.front()->client_metadata());
    client_metadata_ = std::move(kept.client_metadata);
    residual_step_ = kept.residual_step;
    ahead_ = std::move(kept.ahead);
  }
  ahead_.resize(space_.group_count());
  next_ahead_ = ahead_;
  const auto matrices = matrices_of_squares(options_, space_);
  if (!matrices.empty() && compressor_->feedback()) {
    weights_ahead_ = std::make_unique<compress::StepAheadWeights>(matrices, space_, set_.subgroups);
    weights_out_.resize(set_.subgroups.size());
  }
  next_to_keep_.resize(set_.devices.size());
  completions_thread_ = std::jthread([this] { take_completions(); });
}

DeviceUpdater::~DeviceUpdater() {
  {
    // A commit that was started is carried through; anything else is dropped with the devices.
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !commit_wanted_; });
  }
  step_replies_.close();
  completions_thread_.join();
  set_.devices.clear();  // each waits for what it has in flight
}

base::StepNumber DeviceUpdater::number_of(const UpdateOptions& options) const {
  return options.number != 0 ? options.number : committed_step_ + 1;
}

Status DeviceUpdater::require(Phase phase, std::string_view what) const {
  if (phase_ == phase) return Status();
  if (phase_ == Phase::kBroken) {
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("{} after the devices failed to agree on a step", what),
                  "Open the updater again: it recovers the last committed step.");
  }
  if (phase_ == Phase::kUnwritten) {
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("{} before the initial state was written", what),
                  "Call initialize() first.");
  }
  return Status(ErrorCode::kFailedPrecondition, fmt::format("{} out of order", what),
                "A step is begin_step, put_gradient, finish_gradients, start_update, commit.");
}

// ---- The whole state: initialization, reading.

void DeviceUpdater::submit_to_all(const csd::Message& message, DeviceReplies& replies) {
  for (const auto& device : set_.devices) replies.submit(*device, message);
}

Status DeviceUpdater::on_device(csd::Device& device, csd::Message message) {
  caller_replies_.submit(device, std::move(message));
  return caller_replies_.next().status;
}

Status DeviceUpdater::on_all_devices(const csd::Message& message) {
  submit_to_all(message, caller_replies_);
  Status result;
  while (caller_replies_.owed() > 0) {
    Status status = caller_replies_.next().status;
    if (result.ok()) result = std::move(status);
  }
  return result;
}

Status DeviceUpdater::initialize(const std::function<void(uint64_t, std::span<float>)>& fill,
                                 const std::string& client_metadata) {
  if (client_metadata.size() > storage::Store::kClientMetadataBytesMax)
    return client_metadata_too_long();
  {
    const std::lock_guard lock(mutex_);
    if (phase_ != Phase::kUnwritten) {
      return Status(ErrorCode::kFailedPrecondition, "the devices hold state already",
                    "initialize() is for fresh devices only.");
    }
  }
  SI_RETURN_IF_ERROR(on_all_devices(csd::BeginStep{0}));
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
  SI_RETURN_IF_ERROR(std::move(result));
  SI_RETURN_IF_ERROR(on_all_devices(csd::Prepare{0, client_metadata}));
  SI_RETURN_IF_ERROR(on_all_devices(csd::Commit{0}));
  const std::lock_guard lock(mutex_);
  phase_ = Phase::kIdle;
  committed_step_ = 0;
  client_metadata_ = client_metadata;
  return Status();
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
    SI_RETURN_IF_ERROR(require(Phase::kIdle, "reading the state"));
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
  if (client_metadata.size() > storage::Store::kClientMetadataBytesMax)
    return client_metadata_too_long();
  SI_RETURN_IF_ERROR(wait_commit());
  if (compressor_ == nullptr || !compressor_->feedback()) residual = nullptr;
  const bool write_residuals =
      residual != nullptr && set_.residual && options_.compress.residual_on_devices();
  base::StepNumber step = 0;
  std::string stored;
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(require(Phase::kIdle, "editing the state"));
    step = committed_step_ + 1;
    // What compression keeps and is not given anew is the new step's as well.
    keeping_ =
        residual != nullptr ? write_residuals : set_.residual && residual_step_ == committed_step_;
    new_residual_ = residual != nullptr;
    samples_next_ = samples_current_ && !edit;
    next_ahead_ = ahead.empty() ? ahead_ : std::vector(ahead.begin(), ahead.end());
    commit_client_metadata_ = client_metadata;
    stored = stored_client_metadata();
  }
  SI_RETURN_IF_ERROR(on_all_devices(csd::BeginStep{step}));
  Status result = edit ? edit_subgroups(edit) : Status();
  if (residual != nullptr) compressor_->propose_residual(residual);
  if (result.ok() && write_residuals) result = keep_all();
  if (result.ok()) result = on_all_devices(csd::Prepare{step, stored});
  if (!result.ok()) {
    const Status aborted = on_all_devices(csd::Abort{step});
    const std::lock_guard lock(mutex_);
    if (!aborted.ok()) phase_ = Phase::kBroken;
    return result;
  }
  {
    const std::lock_guard lock(mutex_);
    phase_ = Phase::kPrepared;
  }
  return options_.external_commit ? Status() : commit_prepared();
}

Status DeviceUpdater::commit_prepared() {
  SI_RETURN_IF_ERROR(wait_commit());
  base::StepNumber step = 0;
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(require(Phase::kPrepared, "a commit finished"));
    step = committed_step_ + 1;
  }
  Status result = on_all_devices(csd::Commit{step});
  const std::lock_guard lock(mutex_);
  if (!result.ok()) {
    phase_ = Phase::kBroken;  // some may have committed
    return result;
  }
  committed();
  phase_ = Phase::kIdle;
  return Status();
}

Status DeviceUpdater::flush() {
  SI_RETURN_IF_ERROR(wait_commit());
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kUnwritten) return Status();
    SI_RETURN_IF_ERROR(require(Phase::kIdle, "a flush"));
  }
  return on_all_devices(csd::Flush{});
}

const base::Bf16* DeviceUpdater::residual() const {
  return compressor_ != nullptr ? compressor_->residual() : nullptr;
}

std::vector<kernels::StepAhead> DeviceUpdater::step_ahead() const {
  const std::lock_guard lock(mutex_);
  return weights_ahead_ == nullptr ? std::vector<kernels::StepAhead>() : ahead_;
}

void DeviceUpdater::committed() {
  ++committed_step_;
  client_metadata_ = std::move(commit_client_metadata_);
  if (keeping_) residual_step_ = committed_step_;
  if (new_residual_) compressor_->commit();
  ahead_ = next_ahead_;
  samples_current_ = samples_next_;
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

// ---- A step: gradients.

Status DeviceUpdater::begin_step() {
  SI_RETURN_IF_ERROR(wait_commit());
  base::StepNumber step = 0;
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(require(Phase::kIdle, "a step begun"));
  }
  SI_RETURN_IF_ERROR(find_samples());
  {
    const std::lock_guard lock(mutex_);
    step = committed_step_ + 1;
    phase_ = Phase::kGradients;
    step_error_ = Status();
  }
  gradient_tracker_.begin();
  if (compressor_ != nullptr) compressor_->begin_step();
  skipped_.clear();
  gradient_error_ = Status();
  gradient_error_ = on_all_devices(csd::BeginStep{step});
  return gradient_error_;
}

Status DeviceUpdater::put_gradient(uint64_t first, const void* gradient, base::DataType type,
                                   uint64_t count) {
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(require(Phase::kGradients, "a gradient given"));
  }
  SI_RETURN_IF_ERROR(gradient_error_);
  SI_ASSIGN_OR_RETURN(const auto pieces, gradient_tracker_.take(first, count));
  if (compressor_ != nullptr) {
    const auto* bytes = static_cast<const std::byte*>(gradient);
    team_.run(pieces.size(), [&](uint32_t, size_t index) {
      const GradientTracker::Piece& piece = pieces[index];
      const std::byte* values = bytes + (piece.first - first) * base::data_type_bytes(type);
      compressor_->put(piece.first, values, type, piece.count);
      gradient_tracker_.measure(piece, values, type);
    });
    return Status();
  }
  GradientSender::Failure failure =
      gradient_sender_.put(pieces, first, gradient, type, staging_.bytes());
  gradient_error_ = std::move(failure.status);
  return gradient_error_;
}

Status DeviceUpdater::skip_gradient(uint64_t first, uint64_t count) {
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(require(Phase::kGradients, "a gradient skipped"));
  }
  SI_RETURN_IF_ERROR(gradient_tracker_.take(first, count).status());
  skipped_.push_back({first, count});
  return Status();
}

bool DeviceUpdater::is_skipped(const plan::Subgroup& subgroup, const UpdateOptions& options) const {
  const auto spans = space_.spans(subgroup.first, subgroup.count);
  return std::all_of(spans.begin(), spans.end(),
                     [&](const plan::GroupSpan& span) { return options.groups[span.group].skip; });
}

Status DeviceUpdater::fill_skipped(const UpdateOptions& options) {
  if (skipped_.empty()) return Status();
  std::memset(staging_.data(), 0, staging_.size());
  for (const Skipped& skipped : skipped_) {
    const uint64_t end = skipped.first + skipped.count;
    for (size_t i = set_.subgroup_at(skipped.first);
         i < set_.subgroups.size() && set_.subgroups[i].first < end; ++i) {
      const plan::Subgroup& subgroup = set_.subgroups[i];
      if (is_skipped(subgroup, options)) continue;
      const uint64_t first = std::max(skipped.first, subgroup.first);
      const uint64_t count = std::min(end, subgroup.first + subgroup.count) - first;
      GradientSender::Failure failure = gradient_sender_.put_zeros(first, count, staging_.bytes());
      gradient_error_ = std::move(failure.status);
      SI_RETURN_IF_ERROR(gradient_error_);
    }
  }
  return Status();
}

base::Result<GradientSummary> DeviceUpdater::finish_gradients(double unscale) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kSummed) SI_RETURN_IF_ERROR(require(Phase::kGradients, "a norm asked for"));
  SI_RETURN_IF_ERROR(gradient_error_);
  SI_ASSIGN_OR_RETURN(GradientSummary summary, gradient_tracker_.finish(unscale));
  phase_ = Phase::kSummed;
  return summary;
}

// ---- A step: update and weights.

Status DeviceUpdater::start_update(const UpdateOptions& options, base::DataType type,
                                   const WeightsSink& sink) {
  if (options.groups.size() < space_.group_count()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("learning rates for {} groups given, the model has {}",
                              options.groups.size(), space_.group_count()),
                  "Give one entry for every group of the parameter space.");
  }
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(require(Phase::kSummed, "an update started"));
  }
  for (const Skipped& skipped : skipped_) {
    for (const plan::GroupSpan& span : space_.spans(skipped.first, skipped.count)) {
      if (options.groups[span.group].skip) continue;
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("{} got no gradient, but its group is to be updated",
                                space_.at(span.first).name),
                    "Set skip for the groups whose gradient was skipped.");
    }
  }
  SI_RETURN_IF_ERROR(compressor_ != nullptr ? send_compressed(options) : fill_skipped(options));
  const std::lock_guard lock(mutex_);
  std::vector<csd::Update> updates(set_.devices.size());
  for (size_t i = 0; i < set_.subgroups.size(); ++i) {
    const plan::Subgroup& subgroup = set_.subgroups[i];
    const bool alone = is_skipped(subgroup, options);
    weights_ready_[i] = alone ? 1 : 0;  // nothing of it changes
    updated_[i] = alone ? 0 : 1;
    if (alone) continue;
    void* weights = sink ? sink(subgroup.first) : nullptr;
    base::Bf16* samples = nullptr;
    if (weights_ahead_ != nullptr) {
      weights_out_[i] = weights;
      samples = weights_ahead_->samples();
    }
    updates[set_.owner[i].value].updates.push_back({subgroup.id, weights, samples});
  }
  if (weights_ahead_ != nullptr) {
    weights_ahead_->expect(updated_);
    samples_current_ = false;
    samples_next_ = true;
  }
  const base::StepNumber number = number_of(options);
  // A group that is skipped keeps its own: its weights stay where they are.
  next_ahead_ = ahead_;
  for (uint32_t g = 0; g < space_.group_count(); ++g) {
    if (options.groups[g].skip) continue;
    next_ahead_[g] = kernels::make_step_ahead(options_.rule, options.groups[g], number);
  }
  std::vector<kernels::StepScalars> scalars;
  for (uint32_t g = 0; g < space_.group_count(); ++g) {
    scalars.push_back(kernels::make_step_scalars(
        options_.rule, options.groups[g], number,
        compressor_ != nullptr ? 1 : options.gradient_scale, options_.seed));
  }
  if (compressor_ != nullptr) compression_ = compressor_->summary();
  phase_ = Phase::kUpdating;
  updates_in_flight_ = static_cast<size_t>(
      std::count_if(updates.begin(), updates.end(),
                    [](const csd::Update& update) { return !update.updates.empty(); }));
  for (size_t d = 0; d < updates.size(); ++d) {
    if (updates[d].updates.empty()) continue;
    updates[d].weights_type = type;
    updates[d].scalars = scalars;
    step_replies_.submit(*set_.devices[d], std::move(updates[d]));
  }
  return Status();
}

Status DeviceUpdater::wait_weights(uint64_t first, uint64_t count) {
  SI_CHECK(first <= space_.count() && count <= space_.count() - first,
           "weights outside the parameter space");
  if (count == 0) return Status();
  const size_t from = set_.subgroup_at(first);
  const size_t to = set_.subgroup_at(first + count - 1);
  std::unique_lock lock(mutex_);
  const auto all_ready = [&] {
    return std::all_of(weights_ready_.begin() + static_cast<ptrdiff_t>(from),
                       weights_ready_.begin() + static_cast<ptrdiff_t>(to) + 1,
                       [](uint8_t ready) { return ready != 0; });
  };
  changed_.wait(lock, [&] {
    return all_ready() || !step_error_.ok() || !commit_error_.ok() || updates_in_flight_ == 0;
  });
  if (!step_error_.ok()) return step_error_;
  if (!commit_error_.ok()) return commit_error_;
  if (!all_ready()) {
    return Status(ErrorCode::kFailedPrecondition, "weights waited for without an update",
                  "Call start_update() first.");
  }
  return Status();
}

// ---- A step: commit.

void DeviceUpdater::take_completions() {
  for (;;) {
    Completion completion = step_replies_.next();
    if (completion.command == nullptr) return;  // closed
    const bool ready = completion.event == Completion::Event::kWeightsReady;
    std::vector<size_t> weights_ready;
    if (ready && completion.status.ok()) {
      const size_t subgroup = completion.subgroup.value;
      if (weights_ahead_ == nullptr) {
        weights_ready.push_back(subgroup);
      } else {
        weights_ahead_->arrived({compressor_->next_residual(0), next_ahead_}, subgroup,
                                weights_out_[subgroup],
                                completion.command->as<csd::Update>()->weights_type,
                                [&](size_t done) { weights_ready.push_back(done); });
      }
    }
    {
      const std::lock_guard lock(mutex_);
      for (const size_t subgroup : weights_ready) weights_ready_[subgroup] = 1;
      complete(std::move(completion));
    }
    changed_.notify_all();
  }
}

void DeviceUpdater::complete(Completion&& completion) {
  if (!completion.status.ok()) {
    if (phase_ == Phase::kAborting) abort_failed_ = true;
    if (step_error_.ok()) step_error_ = std::move(completion.status);
  }
  if (completion.event == Completion::Event::kWeightsReady) return;
  if (completion.command->as<csd::Update>() != nullptr) {
    if (--updates_in_flight_ == 0 && commit_wanted_) advance();
    return;
  }
  if (phase_ == Phase::kKeeping && step_error_.ok()) {
    size_t device = 0;
    while (set_.devices[device].get() != completion.command->owner) ++device;
    if (next_to_keep_[device] < set_.devices[device]->layout().subgroups.size()) {
      return keep_next_of(device);
    }
  }
  if (--replies_due_ == 0) advance();
}

void DeviceUpdater::enter(Phase phase, const csd::Message& message) {
  phase_ = phase;
  replies_due_ = set_.devices.size();
  submit_to_all(message, step_replies_);
}

void DeviceUpdater::advance() {
  const base::StepNumber step = committed_step_ + 1;
  const auto end = [&](Phase phase, Status error) {
    phase_ = phase;
    commit_error_ = std::move(error);
    commit_wanted_ = false;
  };
  switch (phase_) {
    case Phase::kUpdating:
      if (keeping_ && step_error_.ok()) {
        phase_ = Phase::kKeeping;
        replies_due_ = set_.devices.size();
        std::fill(next_to_keep_.begin(), next_to_keep_.end(), size_t{0});
        for (size_t d = 0; d < set_.devices.size(); ++d) keep_next_of(d);
        return;
      }
      [[fallthrough]];
    case Phase::kKeeping:
      if (step_error_.ok())
        return enter(Phase::kPreparing, csd::Prepare{step, stored_client_metadata()});
      return enter(Phase::kAborting, csd::Abort{step});
    case Phase::kPreparing:
      if (step_error_.ok() && options_.external_commit) return end(Phase::kPrepared, Status());
      if (step_error_.ok()) return enter(Phase::kCommitting, csd::Commit{step});
      return enter(Phase::kAborting, csd::Abort{step});
    case Phase::kCommitting:
      // Every device is prepared, so whichever failed now, opening again rolls the step forward or
      // back on all of them. Here it cannot be known which.
      if (!step_error_.ok()) return end(Phase::kBroken, std::move(step_error_));
      committed();
      return end(Phase::kIdle, Status());
    case Phase::kAborting:
      // The caller hears of the error that led here.
      return end(abort_failed_ ? Phase::kBroken : Phase::kIdle, std::move(step_error_));
    default:
      SI_CHECK(false, "a reply outside of a commit");
  }
}

Status DeviceUpdater::start_commit(const std::string& client_metadata) {
  if (client_metadata.size() > storage::Store::kClientMetadataBytesMax)
    return client_metadata_too_long();
  const std::lock_guard lock(mutex_);
  SI_RETURN_IF_ERROR(require(Phase::kUpdating, "a commit"));
  if (commit_wanted_) {
    return Status(ErrorCode::kFailedPrecondition, "a step is being committed already",
                  "Call wait_commit() first.");
  }
  commit_wanted_ = true;
  const uint64_t every = options_.compress.residual_every;
  keeping_ = set_.residual && options_.compress.residual_on_devices() &&
             (keep_wanted_ || (committed_step_ + 1) % every == 0);
  keep_wanted_ = false;
  new_residual_ = compressor_ != nullptr;
  commit_client_metadata_ = client_metadata;
  abort_failed_ = false;
  if (updates_in_flight_ == 0) advance();
  return Status();
}

Status DeviceUpdater::wait_commit() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !commit_wanted_; });
  return std::exchange(commit_error_, Status());
}

Status DeviceUpdater::abort() {
  base::StepNumber step = 0;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !commit_wanted_; });
    commit_error_ = Status();  // a failed commit has aborted its step
    if (phase_ == Phase::kIdle || phase_ == Phase::kUnwritten) return Status();
    if (phase_ == Phase::kBroken) return require(Phase::kIdle, "a step aborted");
    step = committed_step_ + 1;
  }
  // A device drops an update that is under way, and answers it before this.
  const Status result = on_all_devices(csd::Abort{step});
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return updates_in_flight_ == 0; });
  step_error_ = Status();
  phase_ = result.ok() ? Phase::kIdle : Phase::kBroken;
  return result;
}

// ---- Compression.

std::string DeviceUpdater::stored_client_metadata() const {
  KeptBlob kept;
  kept.client_metadata = commit_client_metadata_;
  if (set_.residual) {
    kept.residual_step = keeping_ ? std::optional(committed_step_ + 1) : residual_step_;
    if (weights_ahead_ != nullptr) kept.ahead = next_ahead_;
  }
  return join_blob(kept);
}

Status DeviceUpdater::recall_residual() {
  if (compressor_ == nullptr || !compressor_->feedback() || set_.fresh || committed_step_ == 0) {
    return Status();
  }
  if (!set_.residual || residual_step_ != committed_step_) {
    base::log(
        base::LogLevel::kWarning,
        fmt::format("what compression kept at step {} is not on the devices; going on without "
                    "it (compress.residual_every = 1 writes it in every step)",
                    committed_step_));
    return Status();
  }
  const size_t plane = kernels::rule_planes(options_.rule.rule).size();
  return read_planes(1u << plane, plane + 1,
                     [&](uint64_t first, std::span<const std::span<const float>> planes) {
                       compressor_->set_residual(first, planes.back());
                       return Status();
                     });
}

csd::WriteState DeviceUpdater::next_residual(size_t device, size_t subgroup) const {
  const storage::StoreLayout& layout = set_.devices[device]->layout();
  const storage::StoredSubgroup& stored = layout.subgroups[subgroup];
  csd::WriteState write{stored.id, stored.count, {}, 1u << (layout.planes.size() - 1)};
  write.residual = compressor_->next_residual(stored.first_element);
  return write;
}

void DeviceUpdater::keep_next_of(size_t device) {
  step_replies_.submit(*set_.devices[device], next_residual(device, next_to_keep_[device]++));
}

Status DeviceUpdater::keep_all() {
  for (size_t d = 0; d < set_.devices.size(); ++d) {
    for (size_t i = 0; i < set_.devices[d]->layout().subgroups.size(); ++i) {
      SI_RETURN_IF_ERROR(on_device(*set_.devices[d], next_residual(d, i)));
    }
  }
  return Status();
}

Status DeviceUpdater::send_compressed(const UpdateOptions& options) {
  SI_ASSIGN_OR_RETURN(const GradientSummary gradient,
                      gradient_tracker_.finish(options.gradient_scale));
  std::vector<plan::GroupSpan> skipped = space_.spans(0, space_.count());
  std::erase_if(skipped,
                [&](const plan::GroupSpan& span) { return !options.groups[span.group].skip; });
  compressor_->begin_update(number_of(options), options.gradient_scale, gradient.norm, skipped,
                            team_);
  std::vector<CompressedSender::Piece> pieces;
  for (const plan::Subgroup& subgroup : set_.subgroups) {
    if (is_skipped(subgroup, options)) {
      compressor_->leave(subgroup);
      continue;
    }
    CompressedSender::Piece& piece = pieces.emplace_back();
    piece.subgroup = &subgroup;
    piece.device = &device_of(subgroup.id);
    piece.skipped = space_.spans(subgroup.first, subgroup.count);
    std::erase_if(piece.skipped,
                  [&](const plan::GroupSpan& span) { return !options.groups[span.group].skip; });
  }
  return compressed_sender_->send(pieces).status;
}

void DeviceUpdater::keep_residual() {
  const std::lock_guard lock(mutex_);
  keep_wanted_ = true;
}

compress::CompressionSummary DeviceUpdater::compression() const {
  const std::lock_guard lock(mutex_);
  return compression_;
}

// ---- Readings.

bool DeviceUpdater::fresh() const {
  const std::lock_guard lock(mutex_);
  return phase_ == Phase::kUnwritten;
}

base::StepNumber DeviceUpdater::committed_step() const {
  const std::lock_guard lock(mutex_);
  return committed_step_;
}

std::string DeviceUpdater::client_metadata() const {
  const std::lock_guard lock(mutex_);
  return client_metadata_;
}

UpdaterTraffic DeviceUpdater::traffic() const {
  UpdaterTraffic traffic;
  for (const auto& device : set_.devices) {
    traffic.devices.push_back(device->info().name);
    traffic.host_link_by_device.push_back(device->host_traffic());
    traffic.store_by_device.push_back(device->store_traffic());
    traffic.host_link += traffic.host_link_by_device.back();
    traffic.store += traffic.store_by_device.back();
    traffic.state_bytes_cached += device->state_bytes_cached();
  }
  return traffic;
}

uint64_t DeviceUpdater::bytes_written_ever() const {
  uint64_t bytes = 0;
  for (const auto& device : set_.devices) bytes += device->bytes_written_ever();
  return bytes;
}

std::vector<std::span<std::byte>> DeviceUpdater::scratch_memory() {
  std::vector<std::span<std::byte>> memory;
  for (const auto& device : set_.devices) memory.push_back(device->scratch_memory());
  return memory;
}

uint64_t DeviceUpdater::memory_bytes() const {
  uint64_t bytes = staging_.size();
  for (const auto& device : set_.devices) bytes += device->info().memory_bytes;
  return bytes;
}

uint64_t DeviceUpdater::state_cache_bytes() const {
  uint64_t bytes = 0;
  for (const auto& device : set_.devices) bytes += device->info().state_cache_bytes;
  return bytes;
}

uint64_t DeviceUpdater::gradient_memory_bytes() const {
  uint64_t bytes = compressor_ != nullptr ? compressor_->memory_bytes() : 0;
  if (weights_ahead_ != nullptr) bytes += weights_ahead_->memory_bytes();
  for (const auto& device : set_.devices) bytes += device->info().gradient_memory_bytes;
  return bytes;
}

uint32_t DeviceUpdater::slots() const {
  uint32_t most = 0;
  for (const auto& device : set_.devices) most = std::max(most, device->info().slots);
  return most;
}

uint64_t DeviceUpdater::subgroup_elements() const {
  return set_.subgroups.empty() ? 0 : set_.subgroups.front().count;
}

std::vector<std::string> DeviceUpdater::describe_devices() const {
  std::vector<std::string> lines;
  for (const auto& device : set_.devices) {
    const csd::DeviceInfo& info = device->info();
    uint64_t elements = 0;
    for (const auto& subgroup : device->layout().subgroups) elements += subgroup.count;
    lines.push_back(fmt::format(
        "{}: {} device, {} ring, {} thread{}, {} slots in {}, {:.1f} % of the parameters in {} "
        "subgroups{}{}",
        info.name, info.kind, info.ring, info.threads, info.threads == 1 ? "" : "s", info.slots,
        base::format_bytes(info.memory_bytes),
        100.0 * static_cast<double>(elements) / static_cast<double>(space_.count()),
        device->layout().subgroups.size(),
        info.cached_subgroups == 0
            ? ""
            : fmt::format(", {} of them in memory too ({})", info.cached_subgroups,
                          base::format_bytes(info.state_cache_bytes)),
        info.gradients_spilled ? ", gradients spilled to the store" : ""));
  }
  return lines;
}

}  // namespace smartinf::engine
