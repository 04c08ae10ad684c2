#include "smartinf/engine/device_updater.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/ranks/peers.h"
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

base::Result<std::unique_ptr<DeviceUpdater>> DeviceUpdater::make(const UpdaterOptions& options,
                                                                 const plan::ParameterSpace& space,
                                                                 DeviceSet set) {
  SI_ASSIGN_OR_RETURN(auto staging, base::AlignedBuffer::allocate(set.staging_bytes));
  std::unique_ptr<DeviceUpdater> made(
      new DeviceUpdater(options, space, std::move(set), std::move(staging)));
  SI_ASSIGN_OR_RETURN(made->path_,
                      make_gradient_path({made->options_, made->space_, made->set_, made->state_,
                                          made->gradient_tracker_, made->team_, made->watch_},
                                         made->metadata_));
  if (!options.tables.empty()) {
    SI_ASSIGN_OR_RETURN(made->tables_, RowTables::open(made->options_, made->set_, made->watch_));
  }
  return made;
}

DeviceUpdater::DeviceUpdater(const UpdaterOptions& options, const plan::ParameterSpace& space,
                             DeviceSet set, base::AlignedBuffer staging)
    : options_(options),
      space_(space),
      set_(std::move(set)),
      watch_(options_.device_silence_max),
      gradient_tracker_(space_),
      team_(gradient_threads(), "si-gradient"),
      state_(set_, kernels::rule_planes(options_.rule.rule).size(), std::move(staging), watch_),
      protocol_({set_.devices.size(), !set_.fresh, set_.step,
                 options.collectives != nullptr || options.peers != nullptr}),
      weights_ready_(set_.subgroups.size(), 0),
      updated_(set_.subgroups.size(), 0),
      fetches_(set_.subgroups.size()) {
  if (!set_.fresh) metadata_ = split_metadata(set_.devices.front()->client_metadata());
  const bool any_here =
      std::any_of(set_.devices.begin(), set_.devices.end(),
                  [](const auto& device) { return !device->info().of_other_rank; });
  if (options_.spool_bytes > 0 && any_here) {
    spool_ = std::make_unique<Spool>(set_.devices, watch_);
  }
  completions_thread_ = std::jthread([this] { take_completions(); });
  const std::shared_ptr<Collectives>& ranks =
      options_.collectives != nullptr ? options_.collectives : options_.peers;
  if (ranks == nullptr) return;
  agreement_ = std::make_unique<base::Worker<Question>>("si-commit", [this, ranks](Question asked) {
    Agreement agreed = agree(*ranks, Channel::kGradients, asked.call, asked.mine);
    {
      const std::lock_guard lock(mutex_);
      act(protocol_.agreed(std::move(agreed.status), agreed.known));
    }
    changed_.notify_all();
  });
}

DeviceUpdater::~DeviceUpdater() {
  {
    // A commit that was started is carried through; anything else is dropped with the devices.
    std::unique_lock lock(mutex_);
    finish_update();
    changed_.wait(lock, [&] { return !protocol_.committing(); });
  }
  agreement_.reset();
  step_replies_.close();
  completions_thread_.join();
  set_.devices.clear();  // each waits for what it has in flight
}

base::StepNumber DeviceUpdater::number_of(const UpdateOptions& options) const {
  return options.number != 0 ? options.number : protocol_.step();
}

void DeviceUpdater::submit_to_all(const csd::Message& message) {
  for (const auto& device : set_.devices) step_replies_.submit(*device, message);
}

// ---- A step: gradients.

Status DeviceUpdater::be_idle(std::string_view what) {
  SI_RETURN_IF_ERROR(wait_commit());
  const std::lock_guard lock(mutex_);
  return protocol_.require(Phase::kIdle, what);
}

Status DeviceUpdater::begin_step() {
  SI_RETURN_IF_ERROR(be_idle("begin_step"));
  SI_RETURN_IF_ERROR(path_->begin_step());
  base::StepNumber step = 0;
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.begin_step());
    step = protocol_.step();
    update_started_ = false;
  }
  gradient_tracker_.begin();
  if (tables_ != nullptr) tables_->forget();
  sum_of_squares_max_ = 0;
  gradient_error_ = state_.on_all_devices(csd::BeginStep{step});
  return gradient_error_;
}

base::Result<std::vector<GradientTracker::Piece>> DeviceUpdater::take_gradient(uint64_t first,
                                                                               uint64_t count) {
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kGradients, "put_gradient"));
  }
  SI_RETURN_IF_ERROR(gradient_error_);
  if (!gradient_tracker_.begun()) prefetch();
  return gradient_tracker_.take(first, count);
}

Status DeviceUpdater::put_gradient(uint64_t first, const void* gradient, base::DataType type,
                                   uint64_t count) {
  SI_ASSIGN_OR_RETURN(const auto pieces, take_gradient(first, count));
  gradient_error_ = path_->put(pieces, first, gradient, type);
  if (sum_of_squares_max_ > 0) watch_norm(pieces);
  return gradient_error_;
}

/// While gradients come in, devices have time to read what the update needs first. An update that
/// is early uses it for itself.
void DeviceUpdater::prefetch() {
  {
    const std::lock_guard lock(mutex_);
    if (protocol_.early()) return;
  }
  std::vector<csd::Prefetch> wanted(set_.devices.size());
  for (size_t i = 0; i < set_.subgroups.size(); ++i) {
    std::vector<base::SubgroupId>& ids = wanted[set_.owner[i].value].subgroups;
    if (ids.size() < set_.devices[set_.owner[i].value]->info().slots) {
      ids.push_back(set_.subgroups[i].id);
    }
  }
  for (size_t d = 0; d < wanted.size(); ++d) {
    if (!wanted[d].subgroups.empty()) step_replies_.submit(*set_.devices[d], std::move(wanted[d]));
  }
}

void DeviceUpdater::watch_norm(std::span<const GradientTracker::Piece> pieces) {
  sum_of_squares_ += gradient_tracker_.sum_of_squares(pieces);
  if (sum_of_squares_ <= sum_of_squares_max_) return;
  sum_of_squares_max_ = 0;
  submit_to_all(csd::StopUpdate{});
}

bool DeviceUpdater::takes_gradients() const {
  const std::lock_guard lock(mutex_);
  return protocol_.phase() == Phase::kGradients;
}

Status DeviceUpdater::skip_gradient(uint64_t first, uint64_t count) {
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kGradients, "skip_gradient"));
  }
  return gradient_tracker_.skip(first, count);
}

base::Result<GradientSummary> DeviceUpdater::finish_gradients(double unscale) {
  base::Result<RowTables::Found> found = RowTables::Found();
  if (tables_ != nullptr) {
    found = tables_->finish_gradients(gradient_error_);
    gradient_error_ = found.status();
  }
  base::Result<GradientSummary> summary = finish_gradients_here(unscale);
  if (options_.peers != nullptr) summary = sum_gradients(*options_.peers, summary);
  if (summary.ok() && found.ok()) add_tables(*found, unscale, *summary);
  return summary;
}

/// The norm of parameters and tables together.
void DeviceUpdater::add_tables(const RowTables::Found& found, double unscale,
                               GradientSummary& summary) {
  if (!found.finite && summary.finite) {
    summary.finite = false;
    summary.first_bad = found.first_bad;
  }
  if (found.sum_of_squares == 0) return;
  const double norm = std::sqrt(found.sum_of_squares) * std::abs(unscale);
  summary.norm = std::sqrt(summary.norm * summary.norm + norm * norm);
}

base::Result<GradientSummary> DeviceUpdater::finish_gradients_here(double unscale) {
  const std::lock_guard lock(mutex_);
  if (protocol_.phase() != Phase::kSummed) {
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kGradients, "finish_gradients"));
  }
  SI_RETURN_IF_ERROR(gradient_error_);
  SI_ASSIGN_OR_RETURN(GradientSummary summary, gradient_tracker_.finish(unscale));
  SI_RETURN_IF_ERROR(protocol_.finish_gradients());
  return summary;
}

// ---- A step: update and weights.

Status DeviceUpdater::check_skipped(const UpdateOptions& options) const {
  for (const GradientTracker::Span& skipped : gradient_tracker_.skipped()) {
    for (const plan::GroupSpan& span : space_.spans(skipped.first, skipped.count)) {
      if (options.groups[span.group].skip) continue;
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("{} got no gradient, but its group is to be updated",
                                space_.at(span.first).name),
                    "Set skip for the groups whose gradient was skipped.");
    }
  }
  return Status();
}

std::vector<csd::Update> DeviceUpdater::make_updates(const UpdateOptions& options,
                                                     double gradient_scale, base::DataType type,
                                                     const WeightsSink& sink) {
  std::vector<csd::Update> updates(set_.devices.size());
  for (size_t i = 0; i < set_.subgroups.size(); ++i) {
    const plan::Subgroup& subgroup = set_.subgroups[i];
    updated_[i] = is_skipped(space_, subgroup, options) ? 0 : 1;
    if (updated_[i] == 0) continue;
    void* weights = sink ? sink(subgroup.first) : nullptr;
    updates[set_.owner[i].value].updates.push_back({subgroup.id, weights, nullptr});
  }
  const base::StepNumber number = number_of(options);
  for (csd::Update& update : updates) {
    update.weights_type = type;
    for (uint32_t g = 0; g < space_.group_count(); ++g) {
      update.scalars.push_back(kernels::make_step_scalars(options_.rule, options.groups[g], number,
                                                          gradient_scale, options_.seed));
    }
  }
  return updates;
}

void DeviceUpdater::restore_skipped(const std::vector<uint8_t>& guessed, const WeightsSink& sink,
                                    std::vector<csd::Update>& updates) {
  for (size_t i = 0; i < set_.subgroups.size(); ++i) {
    const plan::Subgroup& subgroup = set_.subgroups[i];
    if (updated_[i] != 0 || guessed[i] == 0) continue;
    const auto spans = gradient_tracker_.skipped();
    const bool complete =
        std::none_of(spans.begin(), spans.end(), [&](const GradientTracker::Span& skipped) {
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
  SI_RETURN_IF_ERROR(path_->early_update_possible());
  for (const auto& device : set_.devices) {
    const Status& possible = device->info().updates_as_completed;
    if (!possible.ok()) return Status(possible).with_context(device->info().name);
  }
  return Status();
}

Status DeviceUpdater::start_early_update(const UpdateOptions& guess, base::DataType type,
                                         const WeightsSink& sink, double norm_max) {
  SI_RETURN_IF_ERROR(check_groups(guess, space_));
  SI_RETURN_IF_ERROR(early_update_possible());
  const std::lock_guard lock(mutex_);
  if (gradient_tracker_.begun()) {
    return Status(ErrorCode::kFailedPrecondition,
                  "start_early_update was called after the first gradient",
                  "Call start_early_update() right after begin_step().");
  }
  std::vector<csd::Update> updates = make_updates(guess, guess.gradient_scale, type, sink);
  SI_RETURN_IF_ERROR(protocol_.start_early_update(devices_in(updates)));
  for (csd::Update& update : updates) update.mode = plan::UpdateMode::kAsCompleted;
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
  SI_RETURN_IF_ERROR(check_groups(options, space_));
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kSummed, "start_update"));
  }
  SI_RETURN_IF_ERROR(check_skipped(options));
  const base::StepNumber number = number_of(options);
  auto scale = path_->finish(options, number);
  if (!scale.ok()) return gradient_error_ = std::move(scale).status();
  const std::lock_guard lock(mutex_);
  const std::vector<uint8_t> guessed = updated_;
  std::vector<csd::Update> updates = make_updates(options, *scale, type, sink);
  const bool right = protocol_.early() && guess_type_ == type && guess_ == updates.front().scalars;
  if (protocol_.early() && !right) restore_skipped(guessed, sink, updates);
  path_->start_update(options, number, updates);
  std::vector<std::vector<csd::UpdateRows>> of_tables;
  size_t messages = devices_in(updates);
  if (tables_ != nullptr) {
    std::vector<double> rates = options.table_rates;
    rates.resize(tables_->count(), options.groups.front().lr);
    of_tables = tables_->make_updates(rates, number, options.gradient_scale);
    for (const auto& of_device : of_tables) messages += of_device.size();
  }
  SI_RETURN_IF_ERROR(protocol_.start_update(messages));
  for (size_t d = 0; d < of_tables.size(); ++d) {
    for (csd::UpdateRows& message : of_tables[d]) {
      step_replies_.submit(*set_.devices[d], std::move(message));
    }
  }
  if (right) {
    for (csd::Update& update : updates) update.mode = plan::UpdateMode::kRest;
    fetches_.finish();
  } else {
    guess_type_.reset();
    mark_on_demand(updates);
    // Weights that are skipped do not change.
    for (size_t i = 0; i < weights_ready_.size(); ++i) weights_ready_[i] = 1 - updated_[i];
  }
  update_started_ = true;
  update_type_ = type;
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
  for (size_t i = from; i <= to; ++i) {
    if (fetches_.on_demand(i)) finish_update();
  }
  changed_.wait(lock, [&] {
    return all_ready() || !protocol_.error().ok() || !protocol_.outcome().ok() ||
           !protocol_.updating();
  });
  if (!protocol_.error().ok()) return protocol_.error();
  if (!protocol_.outcome().ok()) return protocol_.outcome();
  if (!all_ready()) {
    return Status(ErrorCode::kFailedPrecondition, "wait_weights was called without an update",
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
    const bool early = update != nullptr && update->mode == plan::UpdateMode::kAsCompleted;
    std::vector<size_t> weights_ready;
    if (ready && completion.status.ok()) {
      path_->weights_arrived(completion.subgroup.value, update->weights_type, weights_ready);
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
  if (const auto* read = completion.command->as<csd::ReadWeights>()) {
    return fetches_.end(read->subgroup.value, std::move(completion.status));
  }
  if (completion.command->as<csd::StopUpdate>() != nullptr ||
      completion.command->as<csd::FinishUpdate>() != nullptr ||
      completion.command->as<csd::Prefetch>() != nullptr) {
    return protocol_.failed(std::move(completion.status));
  }
  if (completion.command->as<csd::Update>() != nullptr ||
      completion.command->as<csd::UpdateRows>() != nullptr) {
    return act(protocol_.update_ended(std::move(completion.status)));
  }
  const bool persisting = protocol_.phase() == Phase::kPersisting;
  if (persisting && completion.status.ok() && protocol_.error().ok()) {
    size_t device = 0;
    while (set_.devices[device].get() != completion.command->owner) ++device;
    if (auto write = path_->next_write(device)) {
      step_replies_.submit(*set_.devices[device], *write);
      return;
    }
  }
  act(protocol_.answered(std::move(completion.status)));
}

void DeviceUpdater::act(Next next) {
  switch (next) {
    case Next::kWait:
      return;
    case Next::kWriteResidual:
      for (size_t d = 0; d < set_.devices.size(); ++d) {
        step_replies_.submit(*set_.devices[d], path_->next_write(d).value());
      }
      return;
    case Next::kPrepare:
      return submit_to_all(csd::Prepare{protocol_.step(), next_text_});
    case Next::kAgree: {
      const bool prepared = protocol_.phase() == Phase::kAgreeing;
      const std::string& metadata = next_metadata_.client_metadata;
      // Metadata of one step is the same on all devices.
      return agreement_->post(
          {fmt::format("{} of step {} ({:016x})", prepared ? "prepare" : "commit", protocol_.step(),
                       base::checksum(std::as_bytes(std::span(metadata)))),
           protocol_.error()});
    }
    case Next::kCommit:
      return submit_to_all(csd::Commit{protocol_.step()});
    case Next::kAbort:
      return submit_to_all(csd::Abort{protocol_.step()});
    case Next::kCommitted:
      metadata_ = std::move(next_metadata_);
      return path_->committed();
  }
}

Status DeviceUpdater::start_commit(const std::string& client_metadata) {
  SI_RETURN_IF_ERROR(check_client_metadata(client_metadata));
  const std::lock_guard lock(mutex_);
  SI_RETURN_IF_ERROR(protocol_.require(Phase::kUpdating, "start_commit"));
  if (protocol_.committing()) {
    return Status(ErrorCode::kFailedPrecondition, "a step is already being committed",
                  "Call wait_commit() first.");
  }
  next_metadata_ = {client_metadata, metadata_.residual_step, {}};
  const bool writes = path_->start_commit(protocol_.step(), next_metadata_);
  SI_ASSIGN_OR_RETURN(next_text_, join_metadata(next_metadata_));
  SI_ASSIGN_OR_RETURN(const Next next, protocol_.start_commit(writes));
  act(next);
  return Status();
}

bool DeviceUpdater::committing() const {
  const std::lock_guard lock(mutex_);
  return protocol_.committing();
}

Status DeviceUpdater::wait_commit() {
  std::unique_lock lock(mutex_);
  finish_update();
  changed_.wait(lock, [&] { return !protocol_.committing(); });
  return protocol_.take_outcome();
}

Status DeviceUpdater::abort() {
  {
    std::unique_lock lock(mutex_);
    if (protocol_.committing()) finish_update();
    changed_.wait(lock, [&] { return !protocol_.committing(); });
    fetches_.finish();
    // A device drops an update that is under way, and answers it before this.
    SI_ASSIGN_OR_RETURN(const Next next, protocol_.abort());
    act(next);
  }
  return wait_commit();
}

Status DeviceUpdater::flush() {
  SI_RETURN_IF_ERROR(wait_commit());
  {
    const std::lock_guard lock(mutex_);
    if (protocol_.phase() == Phase::kUnwritten) return Status();
    SI_RETURN_IF_ERROR(protocol_.require(Phase::kIdle, "flush"));
  }
  return state_.on_all_devices(csd::Flush{});
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
  return metadata_.client_metadata;
}

UpdaterTraffic DeviceUpdater::traffic() const {
  UpdaterTraffic traffic;
  for (const auto& device : set_.devices) {
    if (device->info().of_other_rank) continue;
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
  for (const auto& device : set_.devices) {
    if (!device->info().of_other_rank) memory.push_back(device->scratch_memory());
  }
  return memory;
}

uint64_t DeviceUpdater::memory_bytes() const {
  uint64_t bytes = state_.memory().size();
  for (const auto& device : set_.devices) {
    if (!device->info().of_other_rank) bytes += device->info().memory_bytes;
  }
  return bytes;
}

uint64_t DeviceUpdater::state_cache_bytes() const {
  uint64_t bytes = 0;
  for (const auto& device : set_.devices) {
    if (!device->info().of_other_rank) bytes += device->info().state_cache_bytes;
  }
  return bytes;
}

uint64_t DeviceUpdater::gradient_memory_bytes() const {
  uint64_t bytes = path_->memory_bytes();
  for (const auto& device : set_.devices) {
    if (!device->info().of_other_rank) bytes += device->info().gradient_memory_bytes;
  }
  return bytes;
}

uint32_t DeviceUpdater::slots() const {
  uint32_t most = 0;
  for (const auto& device : set_.devices) most = std::max(most, device->info().slots);
  return most;
}

uint64_t DeviceUpdater::subgroup_elements() const {
  uint64_t most = 0;
  for (const plan::Subgroup& subgroup : set_.subgroups) most = std::max(most, subgroup.count);
  return most;
}

std::vector<std::string> DeviceUpdater::describe_devices() const {
  std::vector<std::string> lines;
  for (const auto& device : set_.devices) {
    const csd::DeviceInfo& info = device->info();
    uint64_t elements = 0;
    for (const auto& subgroup : device->layout().subgroups) elements += subgroup.count;
    lines.push_back(fmt::format(
        "{}: {} device, {} ring, {} thread{}, {} slots in {}, {:.1f} % of the parameters in {} "
        "subgroups{}{}{}",
        info.name, info.kind, info.ring, info.threads, info.threads == 1 ? "" : "s", info.slots,
        base::format_bytes(info.memory_bytes),
        100.0 * static_cast<double>(elements) / static_cast<double>(space_.count()),
        device->layout().subgroups.size(),
        info.cached_subgroups == 0
            ? ""
            : fmt::format(", {} of them in memory too ({})", info.cached_subgroups,
                          base::format_bytes(info.state_cache_bytes)),
        info.gradients_spilled ? ", gradients spilled to the store" : "",
        info.spool_bytes == 0
            ? ""
            : fmt::format(", a spool of {}", base::format_bytes(info.spool_bytes))));
  }
  return lines;
}

}  // namespace smartinf::engine
