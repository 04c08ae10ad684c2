#include "smartinf/engine/ranks/ranks_updater.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/engine/device_set.h"
#include "smartinf/engine/new_run.h"
#include "smartinf/engine/ranks/messages.h"
#include "smartinf/engine/ranks/shared_sources.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

std::string packed(const UpdateOptions& options, base::DataType type) {
  const auto& [gradient_scale, groups, table_rates, number] = options;
  return pack(gradient_scale, groups, table_rates, number, type);
}

// ---- Opening.

/// Descriptions of what has to be the same on all ranks, by the name that an error gives it. The
/// bindings name every option, so that a new one is decided on here; those that are not packed are
/// each rank's own.
std::vector<std::pair<std::string_view, std::string>> descriptions(
    const UpdaterOptions& options, const plan::ParameterSpace& space) {
  const auto& [devices, collectives, stages, peers, rule, format, where, schedule, gradient_type,
               seed, compress, memory_budget_bytes, state_cache_bytes, gradient_budget_bytes,
               gradient_room, subgroup_elements, spool_bytes, stream_weights, tables,
               table_memory_bytes, table_log_bytes, durability, checksums, ring, io_bytes, io_depth,
               pin_threads, create, device_silence_max, recover_to, host_link, remote, trace] =
      options;
  std::string packed_devices;
  for (const DeviceOptions& device : devices) {
    const auto& [path, name, threads, bandwidth, capacity_bytes, rated_endurance_bytes,
                 internal_link, rank, processor, processor_traffic] = device;
    packed_devices += pack(path, name, bandwidth, capacity_bytes, rank);
  }
  std::string packed_stages;
  for (const plan::RankSpan& span : stages) {
    packed_stages += pack(span.first, span.count, span.first_rank, span.ranks);
  }
  return {{"model", pack(space.ranges())},
          {"devices", packed_devices},
          {"stages", packed_stages},
          {"optimizer", pack(rule, format, where, gradient_type, seed, stream_weights, durability,
                             schedule, checksums)},
          {"memory budgets", pack(memory_budget_bytes, state_cache_bytes, gradient_budget_bytes,
                                  gradient_room, subgroup_elements, spool_bytes, create)},
          {"tables", pack(tables.size(), table_memory_bytes, table_log_bytes)},
          {"compression", pack(compress.density, compress.values, compress.error_feedback,
                               compress.residual_every, compress.warmup_steps, compress.stages)}};
}

Status check_same(Collectives& ranks, const UpdaterOptions& options,
                  const plan::ParameterSpace& space) {
  const auto mine = descriptions(options, space);
  std::vector<uint64_t> sums;
  for (const auto& [name, text] : mine) {
    sums.push_back(base::checksum(std::as_bytes(std::span(text))));
  }
  SI_ASSIGN_OR_RETURN(const std::vector<uint64_t> all,
                      all_gather_values(ranks, Channel::kControl, std::span<const uint64_t>(sums)));
  for (size_t i = sums.size(); i < all.size(); ++i) {
    if (all[i] == all[i % sums.size()]) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("ranks 0 and {} were given different {}", i / sums.size(),
                              mine[i % sums.size()].first),
                  "Start all ranks with the same recipe and program.");
  }
  return Status();
}

Status check_options(const UpdaterOptions& options, size_t sources) {
  const uint32_t world = options.collectives->world();
  if (options.compress.residual_on_devices()) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("compress.residual_every is {}, but the residuals of several ranks "
                              "are not stored",
                              options.compress.residual_every),
                  "Set it to 0: the residual then begins at 0 whenever the run is started.");
  }
  if (options.compress.on() && !options.stages.empty() && options.stages.front().ranks == 1) {
    return Status(ErrorCode::kUnsupported,
                  "compressed gradients where each stage is one rank's, which has nobody to send "
                  "them to",
                  "Leave compression out (compress.density = 0), or start more ranks than stages.");
  }
  if (options.peers != nullptr || options.recover_to) {
    return Status(ErrorCode::kUnsupported, "ranks that share a run, and have runs of their own",
                  "This is a bug in the caller.");
  }
  if (options.devices.size() != sources) {
    return Status(ErrorCode::kInvalidArgument, "the ranks of some devices are not given",
                  "This is a bug in the caller.");
  }
  for (const DeviceOptions& device : options.devices) {
    if (device.rank < world) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("device {} belongs to rank {}, and there are {} ranks", device.path,
                              device.rank, world),
                  "Start as many ranks as before, or give the device to another one.");
  }
  return Status();
}

/// The ranks agree on what they open; their devices, as all of them see these.
Result<DeviceSources> agree(const UpdaterOptions& options, const plan::ParameterSpace& space,
                            DeviceSources sources) {
  const std::shared_ptr<Collectives>& ranks = options.collectives;
  Status possible = check_options(options, sources.size());
  if (possible.ok()) possible = check_device_options(options, space);
  SI_RETURN_IF_ERROR(all_ok(*ranks, Channel::kControl, "open", possible));
  SI_RETURN_IF_ERROR(check_same(*ranks, options, space));

  std::vector<uint32_t> rank_of_device;
  for (const DeviceOptions& device : options.devices) rank_of_device.push_back(device.rank);
  return share_sources(std::move(sources), rank_of_device, ranks);
}

/// What is compressed is what ranks send each other; devices get dense sums.
UpdaterOptions of_devices(UpdaterOptions options) {
  options.compress = {};
  return options;
}

/// Null: nothing is compressed.
Result<std::unique_ptr<CompressedSums>> make_compressed(const UpdaterOptions& options,
                                                        DeviceUpdater& here) {
  if (!options.compress.on() || options.compress.stages == 0)
    return std::unique_ptr<CompressedSums>();
  if (here.committed_step() > 0 && options.compress.error_feedback &&
      options.collectives->rank() == 0) {
    base::log(base::LogLevel::kWarning,
              fmt::format("the residual of step {} is not on the devices; training continues "
                          "without it",
                          here.committed_step()));
  }
  return CompressedSums::make(options.compress, options.seed, here.gradient_tracker().all_pieces());
}

}  // namespace

Status RanksUpdater::check_new_run(const UpdaterOptions& options, const plan::ParameterSpace& space,
                                   DeviceSources sources, const storage::RunId& old) {
  SI_ASSIGN_OR_RETURN(sources, agree(options, space, std::move(sources)));
  return all_ok(*options.collectives, Channel::kControl, "open devices",
                engine::check_new_run(of_devices(options), space, std::move(sources), old));
}

Result<std::unique_ptr<Updater>> RanksUpdater::open(const UpdaterOptions& options,
                                                    const plan::ParameterSpace& space,
                                                    DeviceSources sources) {
  const std::shared_ptr<Collectives>& ranks = options.collectives;
  SI_ASSIGN_OR_RETURN(sources, agree(options, space, std::move(sources)));
  auto set = open_device_set(of_devices(options), space, sources);
  SI_RETURN_IF_ERROR(all_ok(*ranks, Channel::kControl, "open devices", set.status()));
  auto here = DeviceUpdater::make(of_devices(options), space, std::move(*set));
  Result<std::unique_ptr<CompressedSums>> compressed = std::unique_ptr<CompressedSums>();
  if (here.ok()) compressed = make_compressed(options, **here);
  const Status opened = here.ok() ? compressed.status() : here.status();
  SI_RETURN_IF_ERROR(all_ok(*ranks, Channel::kControl, "open updater", opened));
  return std::unique_ptr<Updater>(
      new RanksUpdater(options, std::move(*here), std::move(*compressed)));
}

RanksUpdater::RanksUpdater(const UpdaterOptions& options, std::unique_ptr<DeviceUpdater> here,
                           std::unique_ptr<CompressedSums> compressed)
    : options_(options),
      ranks_(options.collectives),
      here_(std::move(here)),
      compressed_(std::move(compressed)) {
  const DeviceSet& set = here_->devices();
  for (const plan::Subgroup& subgroup : set.subgroups) {
    rank_of_.push_back(set.device_of(subgroup.id).info().rank);
  }
  for (const plan::Subgroup& subgroup : set.subgroups) {
    std::vector<uint32_t>& users = users_.emplace_back();
    for (uint32_t rank = 0; rank < ranks_->world(); ++rank) {
      const auto uses = [&](const plan::RankSpan& span) {
        return span.has_rank(rank) && span.first < subgroup.first + subgroup.count &&
               subgroup.first < span.end();
      };
      if (options_.stages.empty() || std::ranges::any_of(options_.stages, uses)) {
        users.push_back(rank);
      }
    }
  }
  weights_.assign(rank_of_.size(), Weights::kNone);
  fetches_.assign(rank_of_.size(), Fetch::kNone);
  gradient_exchange_ = std::make_unique<GradientExchange>(
      ranks_, *here_, rank_of_, traffic_, compressed_.get(), options_.compress.stages);
  weight_exchange_ = std::make_unique<WeightExchange>(ranks_, *here_, rank_of_, users_, traffic_);
  if (options_.spool_bytes > 0 && here_->spool() == nullptr) {
    base::log(
        base::LogLevel::kWarning,
        fmt::format("rank {} has no device, so nothing can be spooled there", ranks_->rank()));
  }
}

/// Carries through, with all ranks, what was started.
RanksUpdater::~RanksUpdater() {
  gradient_exchange_.reset();
  weight_exchange_.reset();
}

Status RanksUpdater::all(std::string_view call, const Status& mine) const {
  return all_ok(*ranks_, Channel::kControl, call, mine);
}

// ---- A step: gradients.

Status RanksUpdater::begin_step() {
  Status status = wait_commit();
  if (status.ok()) status = here_->begin_step();
  SI_RETURN_IF_ERROR(all("begin_step", status));
  gradient_exchange_->drop();
  if (compressed_ != nullptr) compressed_->begin_step(committed_step() + 1, here_->team());
  gradient_error_ = Status();
  update_started_ = false;
  return Status();
}

Status RanksUpdater::put_gradient(uint64_t first, const void* gradient, base::DataType type,
                                  uint64_t count) {
  return put_gradient_sums(first, count, {ranks_->world(), type, std::span(&gradient, 1)});
}

Status RanksUpdater::put_gradient_sums(uint64_t first, uint64_t count, const GradientSums& sums) {
  SI_RETURN_IF_ERROR(gradient_error_);
  SI_ASSIGN_OR_RETURN(const std::vector<Holders> holders, holders_of(first, count, sums.trees));
  SI_RETURN_IF_ERROR(gradient_exchange_->check(sums, holders));
  SI_ASSIGN_OR_RETURN(const auto pieces, here_->take_gradient(first, count));
  gradient_exchange_->put(pieces, first, sums, holders);
  return Status();
}

bool RanksUpdater::is_home(size_t subgroup) const {
  return options_.stages.empty() ||
         (users_[subgroup].size() == options_.stages.front().ranks &&
          std::ranges::binary_search(users_[subgroup], rank_of_[subgroup]));
}

Status RanksUpdater::not_home(size_t subgroup) const {
  if (is_home(subgroup)) return Status();
  const plan::Subgroup& at = here_->devices().subgroups[subgroup];
  return Status(
      ErrorCode::kFailedPrecondition,
      fmt::format("a stage reads its weights from its own ranks' devices, but those of elements {} "
                  "to {} are on rank {}'s",
                  at.first, at.first + at.count - 1, rank_of_[subgroup]),
      "The run was begun with another division: set ranks.pipeline, ranks.chunks and ranks.split "
      "as "
      "then, or allow so much memory that the weights stay there.");
}

Result<std::vector<Holders>> RanksUpdater::holders_of(uint64_t first, uint64_t count,
                                                      uint32_t trees) const {
  if (options_.stages.empty()) return std::vector(trees, Holders{0, ranks_->world()});
  std::vector<Holders> holders;
  for (const plan::RankSpan& span : options_.stages) {
    if (first >= span.first && first < span.end() && count <= span.end() - first) {
      holders.push_back({span.first_rank, span.ranks});
    }
  }
  if (holders.size() == trees) return holders;
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("a gradient of {} trees from element {} on, which {} stages have",
                            trees, first, holders.size()),
                "This is a bug in the caller.");
}

Status RanksUpdater::skip_gradient(uint64_t first, uint64_t count) {
  return here_->skip_gradient(first, count);
}

Result<GradientSummary> RanksUpdater::finish_gradients(double unscale) {
  SI_RETURN_IF_ERROR(gradient_error_);
  if (here_->takes_gradients()) {
    // Between them are the same calls on all ranks, or none.
    gradient_error_ =
        all_ok(*ranks_, Channel::kGradients,
               fmt::format("finish_gradients ({:016x})", gradient_exchange_->spans_checksum()),
               gradient_exchange_->finish());
    SI_RETURN_IF_ERROR(gradient_error_);
    gradient_error_ = gradient_exchange_->share_norms();
    SI_RETURN_IF_ERROR(gradient_error_);
  }
  return here_->finish_gradients(unscale);
}

// ---- A step: update and weights.

Status RanksUpdater::early_update_possible() const {
  return Status(ErrorCode::kUnsupported,
                "several ranks do not update before all gradients are there",
                "Start the update when they are (optimizer.overlap = \"late\").");
}

Status RanksUpdater::start_early_update(const UpdateOptions&, base::DataType, const WeightsSink&,
                                        double) {
  return early_update_possible();
}

std::vector<void*> RanksUpdater::places_of(
    const WeightsSink& sink, base::DataType type,
    const std::function<bool(const plan::Subgroup&)>& wanted) {
  std::vector<void*> places;
  for (const plan::Subgroup& subgroup : here_->devices().subgroups) {
    const size_t index = places.size();
    void*& place = places.emplace_back(nullptr);
    if (!sink || !wanted(subgroup)) continue;
    if (is_used(index)) {
      place = sink(subgroup.first);
    } else if (is_here(index)) {
      std::vector<std::byte>& memory = for_others_[index];
      memory.resize(subgroup.count * base::data_type_bytes(type));
      place = memory.data();
    } else {
      place = &users_[index];
    }
  }
  return places;
}

WeightsSink RanksUpdater::sink_here(const std::vector<void*>& places) const {
  return [&](uint64_t first) {
    const size_t subgroup = here_->devices().subgroup_at(first);
    return is_here(subgroup) ? places[subgroup] : nullptr;
  };
}

Status RanksUpdater::all_with(std::string_view call, const std::vector<void*>& places,
                              const Status& mine, std::string_view same) const {
  std::string text(same);
  Status status = mine;
  for (size_t i = 0; i < places.size(); ++i) {
    const bool fetched = places[i] == nullptr;
    if (options_.stages.empty()) text += fetched ? '0' : '1';
    if (fetched && options_.stream_weights && takes_part(i) && status.ok()) status = not_home(i);
  }
  return all(fmt::format("{} ({:016x})", call, base::checksum(std::as_bytes(std::span(text)))),
             status);
}

Status RanksUpdater::start_update(const UpdateOptions& options, base::DataType type,
                                  const WeightsSink& sink) {
  SI_RETURN_IF_ERROR(check_groups(options, space()));
  const auto updated = [&](const plan::Subgroup& subgroup) {
    return !is_skipped(space(), subgroup, options);
  };
  const std::vector<void*> places = places_of(sink, type, updated);
  const Status started = here_->start_update(options, type, sink_here(places));
  SI_RETURN_IF_ERROR(all_with("start_update", places, started, packed(options, type)));
  for (const plan::ParameterRange& range : space().ranges()) {
    if (compressed_ == nullptr || !options.groups[range.group].skip) continue;
    compressed_->leave(range.first, range.count);
  }
  update_started_ = true;
  commit_started_ = false;
  update_type_ = type;
  for (size_t i = 0; i < places.size(); ++i) {
    const bool changes = updated(here_->devices().subgroups[i]) && takes_part(i);
    weights_[i] = !changes ? Weights::kUnchanged
                           : (places[i] != nullptr ? Weights::kInFlight : Weights::kOnDemand);
    if (places[i] == nullptr || !takes_part(i)) continue;
    weight_exchange_->start(WeightExchange::From::kUpdate, i, type, places[i]);
  }
  return Status();
}

Status RanksUpdater::wait_weights(uint64_t first, uint64_t count) {
  SI_CHECK(first <= space().count() && count <= space().count() - first,
           "weights outside the parameter space");
  if (count == 0) return Status();
  const DeviceSet& set = here_->devices();
  const size_t to = set.subgroup_at(first + count - 1);
  for (size_t i = set.subgroup_at(first); i <= to; ++i) {
    if (weights_[i] == Weights::kNone) {
      return Status(ErrorCode::kFailedPrecondition, "wait_weights was called without an update",
                    "Call start_update() first.");
    }
    if (weights_[i] != Weights::kInFlight) continue;
    SI_RETURN_IF_ERROR(weight_exchange_->wait(WeightExchange::From::kUpdate, i));
  }
  return Status();
}

/// On all ranks, though only one has what led here: the commit waits for all of them.
void RanksUpdater::demand_nothing() {
  here_->demand_nothing();
  std::replace(weights_.begin(), weights_.end(), Weights::kOnDemand, Weights::kConsumed);
}

Status RanksUpdater::fetch_weights(uint64_t first, base::DataType type, void* out) {
  SI_RETURN_IF_ERROR(here_->check_fetch(first));
  const size_t index = here_->devices().subgroup_at(first);
  SI_RETURN_IF_ERROR(not_home(index));
  if (fetches_[index] != Fetch::kNone) {
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("the weights from element {} on are being fetched already", first),
                  "Call wait_fetched() first.");
  }
  // As DeviceUpdater::fetch_weights() decides, but by calls alone, which are the same on all ranks.
  const bool of_step = update_started_ && weights_[index] != Weights::kUnchanged;
  const bool served = of_step && weights_[index] == Weights::kOnDemand && update_type_ == type;
  // A failure is that of the wait, on all ranks.
  if (is_here(index)) (void)here_->fetch_weights(first, type, out);
  if (weights_[index] == Weights::kOnDemand) weights_[index] = Weights::kConsumed;
  if (of_step && !served) demand_nothing();
  if (of_step && !served && !commit_started_) {
    fetches_[index] = Fetch::kAfterCommit;
    late_fetches_.push_back({index, type, out});
    return Status();
  }
  fetches_[index] = Fetch::kUnderWay;
  weight_exchange_->start(WeightExchange::From::kFetch, index, type, out);
  return Status();
}

Status RanksUpdater::wait_fetched(uint64_t first) {
  const size_t index = here_->devices().subgroup_at(first);
  switch (fetches_[index]) {
    case Fetch::kNone:
      return Status(ErrorCode::kFailedPrecondition, "wait_fetched was called without a fetch",
                    "Call fetch_weights() first.");
    case Fetch::kAfterCommit:
      return Status(ErrorCode::kFailedPrecondition,
                    "these weights come after a commit that was not started",
                    "Call start_commit() first.");
    case Fetch::kCancelled:
      fetches_[index] = Fetch::kNone;
      return Status(ErrorCode::kCancelled,
                    "the step that would have made these weights was aborted", "Fetch them again.");
    case Fetch::kUnderWay:
      break;
  }
  fetches_[index] = Fetch::kNone;
  return weight_exchange_->wait(WeightExchange::From::kFetch, index);
}

// ---- A step: commit.

Status RanksUpdater::start_commit(const std::string& client_metadata) {
  SI_RETURN_IF_ERROR(here_->start_commit(client_metadata));
  commit_started_ = true;
  for (const LateFetch& late : std::exchange(late_fetches_, {})) {
    fetches_[late.subgroup] = Fetch::kUnderWay;
    weight_exchange_->start(WeightExchange::From::kFetch, late.subgroup, late.type, late.out);
  }
  return Status();
}

Status RanksUpdater::wait_commit() {
  demand_nothing();
  Status status = here_->wait_commit();
  if (!std::exchange(commit_started_, false)) return status;
  if (compressed_ != nullptr && status.ok()) compressed_->committed();
  // Memory that the sink pointed to is the caller's again.
  weight_exchange_->wait_for_all(WeightExchange::From::kUpdate);
  update_started_ = false;
  return status;
}

Status RanksUpdater::abort() {
  gradient_exchange_->drop();
  const Status status = here_->abort();
  // Weights that will not come have failed by now, on the ranks that would have made them.
  weight_exchange_->wait_for_all();
  for (const LateFetch& late : std::exchange(late_fetches_, {})) {
    fetches_[late.subgroup] = Fetch::kCancelled;
    const plan::Subgroup& subgroup = here_->devices().subgroups[late.subgroup];
    if (is_here(late.subgroup)) (void)here_->wait_fetched(subgroup.first);
  }
  weights_.assign(weights_.size(), Weights::kNone);
  gradient_error_ = Status();
  update_started_ = commit_started_ = false;
  return all("abort", status);
}

Status RanksUpdater::flush() {
  Status status = wait_commit();
  if (status.ok()) status = here_->flush();
  return all("flush", status);
}

// ---- Readings.

UpdaterTraffic RanksUpdater::traffic() const {
  UpdaterTraffic traffic = here_->traffic();
  traffic.ranks = traffic_.read();
  return traffic;
}

uint64_t RanksUpdater::memory_bytes() const {
  const plan::RankExchange exchange{
      .elements = space().count(), .ranks = 0, .subgroup_elements = subgroup_elements()};
  uint64_t bytes = here_->memory_bytes() + plan::rank_bytes(space().count(), exchange);
  for (const auto& [subgroup, memory] : for_others_) bytes += memory.size();
  return bytes;
}

uint64_t RanksUpdater::gradient_memory_bytes() const {
  uint64_t mine = options_.stages.empty() ? space().count() : 0;
  for (const plan::RankSpan& span : options_.stages) {
    if (span.has_rank(ranks_->rank())) mine += span.count;
  }
  const uint64_t each = sizeof(base::Bf16) * (options_.compress.error_feedback ? 2 : 1);
  return here_->gradient_memory_bytes() + (compressed_ == nullptr ? 0 : mine * each);
}

std::vector<std::string> RanksUpdater::describe_devices() const {
  std::vector<std::string> lines = here_->describe_devices();
  const auto& devices = here_->devices().devices;
  for (size_t d = 0; d < lines.size(); ++d) {
    lines[d] = fmt::format("rank {}: {}", devices[d]->info().rank, lines[d]);
  }
  uint64_t crossing = 0;
  bool away = false;  // a subgroup is where no rank computes with it
  for (size_t i = 0; !options_.stages.empty() && i < users_.size(); ++i) {
    const auto at_home = static_cast<uint64_t>(std::ranges::count(users_[i], rank_of_[i]));
    away = away || at_home == 0;
    crossing += here_->devices().subgroups[i].count * (users_[i].size() - at_home);
  }
  if (crossing > 0) {
    lines.push_back(fmt::format(
        "weights of {} parameters go from the rank that has their state to another one in each "
        "step, and gradients back{}",
        crossing,
        away ? "; smartinf reshard --stages puts the state of a stage on its own ranks' devices"
             : ""));
  }
  return lines;
}

}  // namespace smartinf::engine
