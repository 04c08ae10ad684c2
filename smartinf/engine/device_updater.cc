#include "smartinf/engine/device_updater.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/device_share.h"
#include "smartinf/kernels/feedback.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;
using csd::Completion;

namespace {

size_t devices_in(const std::vector<csd::Update>& updates) {
  return static_cast<size_t>(
      std::count_if(updates.begin(), updates.end(),
                    [](const csd::Update& update) { return !update.updates.empty(); }));
}

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
      protocol_({set_.devices.size(), options.external_commit, !set_.fresh, set_.step}),
      weights_ready_(set_.subgroups.size(), 0),
      updated_(set_.subgroups.size(), 0) {
  samples_current_ = samples_next_ = set_.fresh;  // all variances are 0
  if (!set_.fresh) {
    StepMetadata kept = split_metadata(set_.devices.front()->client_metadata());
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
    changed_.wait(lock, [&] { return !protocol_.committing(); });
  }
  step_replies_.close();
  completions_thread_.join();
  set_.devices.clear();  // each waits for what it has in flight
}

base::StepNumber DeviceUpdater::number_of(const UpdateOptions& options) const {
  return options.number != 0 ? options.number : protocol_.step();
}

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

// ---- A step: gradients.

Status DeviceUpdater::begin_step() {
  SI_RETURN_IF_ERROR(wait_commit());
  base::StepNumber step = 0;
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kIdle, "a step begun"));
  }
  SI_RETURN_IF_ERROR(find_samples());
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.begin_step());
    step = protocol_.step();
  }
  gradient_tracker_.begin();
  if (compressor_ != nullptr) compressor_->begin_step();
  skipped_.clear();
  gradients_given_ = false;
  sum_of_squares_max_ = 0;
  gradient_error_ = Status();
  gradient_error_ = on_all_devices(csd::BeginStep{step});
  return gradient_error_;
}

Status DeviceUpdater::put_gradient(uint64_t first, const void* gradient, base::DataType type,
                                   uint64_t count) {
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kGradients, "a gradient given"));
  }
  SI_RETURN_IF_ERROR(gradient_error_);
  SI_ASSIGN_OR_RETURN(const auto pieces, gradient_tracker_.take(first, count));
  gradients_given_ = true;
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
  if (sum_of_squares_max_ > 0) watch_norm(pieces);
  return gradient_error_;
}

void DeviceUpdater::watch_norm(std::span<const GradientTracker::Piece> pieces) {
  sum_of_squares_ += gradient_tracker_.sum_of_squares(pieces);
  if (sum_of_squares_ <= sum_of_squares_max_) return;
  sum_of_squares_max_ = 0;
  submit_to_all(csd::StopUpdate{}, step_replies_);
}

Status DeviceUpdater::skip_gradient(uint64_t first, uint64_t count) {
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kGradients, "a gradient skipped"));
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
  if (protocol_.phase() != Phase::kSummed) {
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kGradients, "a norm asked for"));
  }
  SI_RETURN_IF_ERROR(gradient_error_);
  SI_ASSIGN_OR_RETURN(GradientSummary summary, gradient_tracker_.finish(unscale));
  SI_RETURN_IF_ERROR(protocol_.finish_gradients());
  return summary;
}

// ---- A step: update and weights.

Status DeviceUpdater::check_groups(const UpdateOptions& options) const {
  if (options.groups.size() >= space_.group_count()) return Status();
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("learning rates for {} groups given, the model has {}",
                            options.groups.size(), space_.group_count()),
                "Give one entry for every group of the parameter space.");
}

std::vector<csd::Update> DeviceUpdater::make_updates(const UpdateOptions& options,
                                                     base::DataType type, const WeightsSink& sink) {
  std::vector<csd::Update> updates(set_.devices.size());
  for (size_t i = 0; i < set_.subgroups.size(); ++i) {
    const plan::Subgroup& subgroup = set_.subgroups[i];
    updated_[i] = is_skipped(subgroup, options) ? 0 : 1;
    if (updated_[i] == 0) continue;
    void* weights = sink ? sink(subgroup.first) : nullptr;
    base::Bf16* samples = nullptr;
    if (weights_ahead_ != nullptr) {
      weights_out_[i] = weights;
      samples = weights_ahead_->samples();
    }
    updates[set_.owner[i].value].updates.push_back({subgroup.id, weights, samples});
  }
  const base::StepNumber number = number_of(options);
  for (csd::Update& update : updates) {
    update.weights_type = type;
    for (uint32_t g = 0; g < space_.group_count(); ++g) {
      update.scalars.push_back(kernels::make_step_scalars(
          options_.rule, options.groups[g], number,
          compressor_ != nullptr ? 1 : options.gradient_scale, options_.seed));
    }
  }
  return updates;
}

void DeviceUpdater::restore_skipped(const std::vector<uint8_t>& guessed, const WeightsSink& sink,
                                    std::vector<csd::Update>& updates) {
  for (size_t i = 0; i < set_.subgroups.size(); ++i) {
    const plan::Subgroup& subgroup = set_.subgroups[i];
    if (updated_[i] != 0 || guessed[i] == 0) continue;
    const bool complete =
        std::none_of(skipped_.begin(), skipped_.end(), [&](const Skipped& skipped) {
          return skipped.first < subgroup.first + subgroup.count &&
                 subgroup.first < skipped.first + skipped.count;
        });
    if (!complete) continue;  // so it was not updated
    updated_[i] = 1;
    updates[set_.owner[i].value].updates.push_back(
        {subgroup.id, sink ? sink(subgroup.first) : nullptr, nullptr});
  }
}

void DeviceUpdater::submit_updates(std::vector<csd::Update> updates) {
  for (size_t d = 0; d < updates.size(); ++d) {
    if (!updates[d].updates.empty()) step_replies_.submit(*set_.devices[d], std::move(updates[d]));
  }
}

Status DeviceUpdater::early_update_possible() const {
  if (compressor_ != nullptr) {
    return Status(ErrorCode::kUnsupported,
                  "an early update needs whole gradients, and these are compressed",
                  "Start the update when all gradients are there.");
  }
  for (const auto& device : set_.devices) {
    const Status& possible = device->info().updates_as_completed;
    if (!possible.ok()) return Status(possible).with_context(device->info().name);
  }
  return Status();
}

Status DeviceUpdater::start_early_update(const UpdateOptions& guess, base::DataType type,
                                         const WeightsSink& sink, double norm_max) {
  SI_RETURN_IF_ERROR(check_groups(guess));
  SI_RETURN_IF_ERROR(early_update_possible());
  const std::lock_guard lock(mutex_);
  if (gradients_given_ || !skipped_.empty()) {
    return Status(ErrorCode::kFailedPrecondition, "an early update after the first gradient",
                  "Call start_early_update() right after begin_step().");
  }
  std::vector<csd::Update> updates = make_updates(guess, type, sink);
  SI_RETURN_IF_ERROR(protocol_.start_early_update(devices_in(updates)));
  for (csd::Update& update : updates) update.as_completed = true;
  for (size_t i = 0; i < weights_ready_.size(); ++i) weights_ready_[i] = 1 - updated_[i];
  guess_ = updates.front().scalars;
  guess_type_ = type;
  sum_of_squares_ = 0;
  sum_of_squares_max_ = norm_max * norm_max;
  submit_updates(std::move(updates));
  return Status();
}

Status DeviceUpdater::start_update(const UpdateOptions& options, base::DataType type,
                                   const WeightsSink& sink) {
  SI_RETURN_IF_ERROR(check_groups(options));
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kSummed, "an update started"));
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
  const std::vector<uint8_t> guessed = updated_;
  std::vector<csd::Update> updates = make_updates(options, type, sink);
  const bool right = protocol_.early() && guess_type_ == type && guess_ == updates.front().scalars;
  if (protocol_.early() && !right) restore_skipped(guessed, sink, updates);
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
  if (compressor_ != nullptr) compression_ = compressor_->summary();
  SI_RETURN_IF_ERROR(protocol_.start_update(devices_in(updates)));
  if (right) {
    for (csd::Update& update : updates) update.keep_updated = true;
  } else {
    guess_type_.reset();
    // Of what is skipped nothing changes.
    for (size_t i = 0; i < weights_ready_.size(); ++i) weights_ready_[i] = 1 - updated_[i];
  }
  submit_updates(std::move(updates));
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
    return all_ready() || !protocol_.error().ok() || !protocol_.outcome().ok() ||
           !protocol_.updating();
  });
  if (!protocol_.error().ok()) return protocol_.error();
  if (!protocol_.outcome().ok()) return protocol_.outcome();
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
    const auto* update = completion.command->as<csd::Update>();
    const bool early = update != nullptr && update->as_completed;
    std::vector<size_t> weights_ready;
    if (ready && completion.status.ok()) {
      const size_t subgroup = completion.subgroup.value;
      if (weights_ahead_ == nullptr) {
        weights_ready.push_back(subgroup);
      } else {
        weights_ahead_->arrived({compressor_->next_residual(0), next_ahead_}, subgroup,
                                weights_out_[subgroup], update->weights_type,
                                [&](size_t done) { weights_ready.push_back(done); });
      }
    }
    {
      const std::lock_guard lock(mutex_);
      if (early && !guess_type_.has_value()) weights_ready.clear();  // they are made again
      for (const size_t subgroup : weights_ready) weights_ready_[subgroup] = 1;
      complete(std::move(completion));
    }
    changed_.notify_all();
  }
}

void DeviceUpdater::complete(Completion&& completion) {
  if (completion.event == Completion::Event::kWeightsReady) {
    return protocol_.failed(std::move(completion.status));
  }
  if (completion.command->as<csd::StopUpdate>() != nullptr) {
    return protocol_.failed(std::move(completion.status));
  }
  if (completion.command->as<csd::Update>() != nullptr) {
    return act(protocol_.update_ended(std::move(completion.status)));
  }
  const bool persisting = protocol_.phase() == Phase::kPersisting;
  if (persisting && completion.status.ok() && protocol_.error().ok()) {
    size_t device = 0;
    while (set_.devices[device].get() != completion.command->owner) ++device;
    if (next_to_keep_[device] < set_.devices[device]->layout().subgroups.size()) {
      return keep_next_of(device);
    }
  }
  act(protocol_.answered(std::move(completion.status)));
}

void DeviceUpdater::act(Next next) {
  switch (next) {
    case Next::kWait:
      return;
    case Next::kWriteResidual:
      std::fill(next_to_keep_.begin(), next_to_keep_.end(), size_t{0});
      for (size_t d = 0; d < set_.devices.size(); ++d) keep_next_of(d);
      return;
    case Next::kPrepare:
      return submit_to_all(csd::Prepare{protocol_.step(), stored_client_metadata()}, step_replies_);
    case Next::kCommit:
      return submit_to_all(csd::Commit{protocol_.step()}, step_replies_);
    case Next::kAbort:
      return submit_to_all(csd::Abort{protocol_.step()}, step_replies_);
    case Next::kCommitted:
      return committed();
  }
}

void DeviceUpdater::committed() {
  client_metadata_ = std::move(commit_client_metadata_);
  if (keeping_) residual_step_ = protocol_.committed_step();
  if (new_residual_) compressor_->commit();
  ahead_ = next_ahead_;
  samples_current_ = samples_next_;
}

Status DeviceUpdater::check_client_metadata(const std::string& client_metadata) {
  if (client_metadata.size() <= storage::Store::kClientMetadataBytesMax) return Status();
  return Status(
      ErrorCode::kInvalidArgument, "the data to be kept with a step is too long",
      fmt::format("It may take {}.", base::format_bytes(storage::Store::kClientMetadataBytesMax)));
}

Status DeviceUpdater::start_commit(const std::string& client_metadata) {
  SI_RETURN_IF_ERROR(check_client_metadata(client_metadata));
  const std::lock_guard lock(mutex_);
  SI_RETURN_IF_ERROR(protocol_.require(Phase::kUpdating, "a commit"));
  if (protocol_.committing()) {
    return Status(ErrorCode::kFailedPrecondition, "a step is being committed already",
                  "Call wait_commit() first.");
  }
  const uint64_t every = options_.compress.residual_every;
  keeping_ = set_.residual && options_.compress.residual_on_devices() &&
             (keep_wanted_ || protocol_.step() % every == 0);
  keep_wanted_ = false;
  new_residual_ = compressor_ != nullptr;
  commit_client_metadata_ = client_metadata;
  SI_ASSIGN_OR_RETURN(const Next next, protocol_.start_commit(keeping_));
  act(next);
  return Status();
}

bool DeviceUpdater::committing() const {
  const std::lock_guard lock(mutex_);
  return protocol_.committing();
}

Status DeviceUpdater::wait_commit() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !protocol_.committing(); });
  return protocol_.take_outcome();
}

Status DeviceUpdater::abort() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !protocol_.committing(); });
    // A device drops an update that is under way, and answers it before this.
    SI_ASSIGN_OR_RETURN(const Next next, protocol_.abort());
    act(next);
  }
  return wait_commit();
}

Status DeviceUpdater::commit_edit(bool residual, Status written) {
  {
    const std::lock_guard lock(mutex_);
    SI_ASSIGN_OR_RETURN(const Next next, protocol_.start_commit(residual, std::move(written)));
    act(next);
  }
  return wait_commit();
}

Status DeviceUpdater::commit_prepared() {
  SI_RETURN_IF_ERROR(wait_commit());
  {
    const std::lock_guard lock(mutex_);
    SI_ASSIGN_OR_RETURN(const Next next, protocol_.commit_prepared());
    act(next);
  }
  return wait_commit();
}

Status DeviceUpdater::flush() {
  SI_RETURN_IF_ERROR(wait_commit());
  {
    const std::lock_guard lock(mutex_);
    if (protocol_.phase() == Phase::kUnwritten) return Status();
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kIdle, "a flush"));
  }
  return on_all_devices(csd::Flush{});
}

// ---- Readings.

bool DeviceUpdater::fresh() const {
  const std::lock_guard lock(mutex_);
  return protocol_.phase() == Phase::kUnwritten;
}

base::StepNumber DeviceUpdater::committed_step() const {
  const std::lock_guard lock(mutex_);
  return protocol_.committed_step();
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
